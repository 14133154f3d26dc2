"""Makes a SentencePiece model of the tokenizer.json of a T5, the only vocabulary file that transformers 5 writes.

Pieces, scores and the normaliser's table of characters are the same in both. Other settings come from the normaliser
and the pre-tokeniser. Settings without a counterpart in SentencePiece are refused.
"""

import base64
import binascii
import pathlib
import re

from etils import epy

from switch_tf import checks
from switch_tf.conversion import json_files
from switch_tf.refusals import Refusal

with epy.lazy_imports():  # most conversions need no vocabulary
    import sentencepiece
    from sentencepiece import sentencepiece_model_pb2

_SENTINEL, _BYTE = re.compile(r"<extra_id_(\d{1,3})>"), re.compile(r"<0x[0-9A-F]{2}>")
_NUM_SENTINELS = 100  # added when a SentencePiece model is used; <extra_id_0> is the last
_MAX_SCORE = 1e9  # of a piece, the logarithm of a probability
_CONTROL = ("<pad>", "</s>")


def sentencepiece_model(path: str | pathlib.Path) -> bytes:
    """Returns the serialised SentencePiece model of a tokenizer.json, without the 100 sentinels at its end.

    Args:
        path: Path of tokenizer.json.

    Raises:
        Refusal: the file is damaged, not a Unigram model, or has steps that SentencePiece lacks.
    """
    path = pathlib.Path(path)
    content = json_files.read_object(path)
    model = content.get("model")
    if not isinstance(model, dict) or model.get("type") != "Unigram":
        kind = model.get("type") if isinstance(model, dict) else None
        raise Refusal(f"{path} holds a tokenizer of type {checks.shown(kind)}, and only 'Unigram', T5's, becomes a "
                      "vocabulary; train one with `switch-tf vocabulary`, or use the model's spiece.model.")
    proto = sentencepiece_model_pb2.ModelProto()
    pieces = _without_sentinels(_pieces(model, path), path)
    kinds = _kinds(content, model, pieces, path)
    for piece, score in pieces:
        proto.pieces.add(piece=piece, score=score, type=kinds.get(piece, proto.SentencePiece.NORMAL))
    _set_trainer(proto, pieces, model)
    _set_normalizer(proto.normalizer_spec, content, path)
    serialized = proto.SerializeToString(deterministic=True)
    try:
        sentencepiece.SentencePieceProcessor(model_proto=serialized)
    except RuntimeError as error:
        raise Refusal(f"{path} holds pieces that SentencePiece cannot make a model of ({error}); use the model's "
                      "spiece.model.") from None
    return serialized


def _pieces(model, path):
    """Returns `[(piece, score)]` after checks."""
    vocab = model.get("vocab")
    is_valid = isinstance(vocab, list) and all(
        isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], str) and entry[0]
        and type(entry[1]) in (int, float) and abs(entry[1]) < _MAX_SCORE for entry in vocab)
    if not is_valid or len({piece for piece, _ in vocab}) < len(vocab):
        raise Refusal(f"{path} must list distinct pieces with their scores under \"model\", \"vocab\", and does "
                      "not; download it again.")
    try:
        "".join(piece for piece, _ in vocab).encode()
    except UnicodeEncodeError:
        raise Refusal(f"{path} has a piece with half of a surrogate pair, which is no character; download it again."
                      ) from None
    return [(piece, float(score)) for piece, score in vocab]


def _without_sentinels(pieces, path):
    """Removes <extra_id_99>, ..., <extra_id_0> at the end, as they are added when a SentencePiece model is used."""
    held = [piece for piece, _ in pieces if _SENTINEL.fullmatch(piece)]
    if not held:
        return pieces
    expected = [f"<extra_id_{number}>" for number in reversed(range(_NUM_SENTINELS))]
    if held != expected or [piece for piece, _ in pieces[-_NUM_SENTINELS:]] != expected:
        raise Refusal(f"{path} must hold its sentinels as the last {_NUM_SENTINELS} pieces, <extra_id_0> the very "
                      f"last, as T5 does; it has {len(held)}, the first being {held[0]}.")
    return pieces[:-_NUM_SENTINELS]


def _kinds(content, model, pieces, path):
    """Returns the type of each special piece: piece -> number."""
    kind = sentencepiece_model_pb2.ModelProto.SentencePiece
    unk_id, added = model.get("unk_id"), content.get("added_tokens") or []
    if type(unk_id) is not int or not 0 <= unk_id < len(pieces):
        raise Refusal(f"{path} must say with \"unk_id\" which piece stands for unknown text, one of {len(pieces)}, "
                      f"not {checks.shown(unk_id)}.")
    if not isinstance(added, list) or not all(
            isinstance(token, dict) and isinstance(token.get("content"), str) for token in added):
        raise Refusal(f"{path} must list tokens under \"added_tokens\", and does not; download it again.")
    kinds = {piece: kind.BYTE for piece, _ in pieces if model.get("byte_fallback") and _BYTE.fullmatch(piece)}
    kinds |= {token["content"]: kind.CONTROL if token.get("special") else kind.USER_DEFINED for token in added}
    return {**kinds, **dict.fromkeys(_CONTROL, kind.CONTROL), pieces[unk_id][0]: kind.UNKNOWN}


def _set_trainer(proto, pieces, model):
    ids = {piece: id_ for id_, (piece, _) in enumerate(pieces)}
    spec = proto.trainer_spec
    spec.model_type = spec.UNIGRAM
    spec.vocab_size, spec.byte_fallback = len(pieces), bool(model.get("byte_fallback"))
    spec.unk_id, spec.unk_piece = model["unk_id"], pieces[model["unk_id"]][0]
    spec.pad_id, spec.eos_id = (ids.get(piece, -1) for piece in _CONTROL)
    spec.pad_piece, spec.eos_piece = _CONTROL
    spec.bos_id = -1


def _set_normalizer(spec, content, path):
    """Sets the normalisation of text before it is split into pieces."""
    spec.name, spec.escape_whitespaces, spec.add_dummy_prefix = "identity", True, False
    spec.remove_extra_whitespaces = False
    for step in (*_steps(content.get("normalizer"), "normalizers"),
                 *_steps(content.get("pre_tokenizer"), "pretokenizers")):
        match step:
            case {"type": "Precompiled", "precompiled_charsmap": str() | None as charsmap}:
                spec.name, spec.precompiled_charsmap = "precompiled", _decoded(charsmap or "", path)
            case {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " " | "▁"} | {"type": "WhitespaceSplit"}:
                spec.remove_extra_whitespaces = True
            case {"type": "Strip"}:
                pass  # SentencePiece strips where it removes extra whitespace
            case {"type": "Metaspace", "replacement": "▁", **rest}:
                scheme = rest.get("prepend_scheme", "always" if rest.get("add_prefix_space", True) else "never")
                spec.add_dummy_prefix = scheme != "never"
            case _:
                raise Refusal(f"{path} prepares text with the step {checks.shown(step)}, which SentencePiece does "
                              "not have; use the model's spiece.model.")


def _steps(described, key):
    """Returns the steps of a normaliser or pre-tokeniser: none, one or a sequence."""
    if described is None:
        return []
    if isinstance(described, dict) and described.get("type") == "Sequence" and isinstance(described.get(key), list):
        return [step for part in described[key] for step in _steps(part, key)]
    return [described]


def _decoded(charsmap, path):
    try:
        return base64.b64decode(charsmap, validate=True)
    except (binascii.Error, ValueError):
        raise Refusal(f"{path} has a damaged \"precompiled_charsmap\"; download it again.") from None
