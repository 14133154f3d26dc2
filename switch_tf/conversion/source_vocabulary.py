"""Finds the vocabulary of a model in the folder of its run or of its weights.

transformers 5 writes only tokenizer.json for a T5. It becomes a SentencePiece model with the same pieces, scores and
table of characters. Steps that SentencePiece lacks are refused.
"""

import base64
import binascii
import pathlib
import re
from typing import NamedTuple

from etils import epy

from switch_tf import checks
from switch_tf.checkpoints import folders, run_config
from switch_tf.conversion import untrusted_files
from switch_tf.refusals import Refusal
from switch_tf.storage import places

with epy.lazy_imports():  # most conversions need none; the last imports TensorFlow
    import sentencepiece
    from sentencepiece import sentencepiece_model_pb2

    from switch_tf.data import vocabularies

FILE = "spiece.model"  # in the folders of T5 and mT5
_SENTINEL, _BYTE = re.compile(r"<extra_id_(\d{1,3})>"), re.compile(r"<0x[0-9A-F]{2}>")
_NUM_SENTINELS = 100  # added to a loaded SentencePiece model; <extra_id_0> is the last
_MAX_SCORE = 1e9  # absolute, of a log probability
_PAD, _END = "<pad>", "</s>"


class Vocabulary(NamedTuple):
    """The SentencePiece model `content`, the registered `name`, or the `reason` why there is no vocabulary."""

    content: bytes | None = None
    name: str | None = None
    reason: str | None = None


def find(source: str | pathlib.Path) -> Vocabulary:
    """Finds the vocabulary of a run, its checkpoint, or weights in another format.

    Weights are useful without it, so an unreadable one gives a `reason`.
    """
    folder = folders.run_folder_of(source)
    try:
        if run_config.is_in(folder):
            stored, *differing = {vocabularies.Stored.from_data(fields)
                                  for fields in run_config.read(folder).vocabularies.values()}
            if differing:
                return Vocabulary(reason=f"{folder} has one for inputs and another for targets, and VOCABULARY "
                                         "replaces both.")
            choice = vocabularies.choice_of(stored, folder)
            if choice is None:
                return Vocabulary(reason=f"no VOCABULARY selects {stored.name!r} of {folder}; train on its own task.")
            if stored.kind != vocabularies.SENTENCEPIECE:
                return Vocabulary(name=choice)
            return Vocabulary(content=vocabularies.path_of(stored, folder).read_bytes())
        folder = places.at(source)
        if (path := folder / FILE).exists():
            return Vocabulary(content=untrusted_files.content(path))
        classes = (untrusted_files.read_object(folder / name).get("tokenizer_class")
                   for name in ("tokenizer_config.json", "config.json") if (folder / name).exists())
        if next(filter(None, classes), None) == "ByT5Tokenizer":
            return Vocabulary(name="bytes")
        if (path := folder / "tokenizer.json").exists():
            return Vocabulary(content=sentencepiece_model(path))
        return Vocabulary(reason=f"{folder} has neither {FILE} nor tokenizer.json; download one of them with the "
                                 "weights, or name the VOCABULARY that the model was trained with.")
    except Refusal as error:
        return Vocabulary(reason=str(error))


def sentencepiece_model(path: pathlib.Path) -> bytes:
    """Returns the serialised SentencePiece model of a Unigram tokenizer.json, without the 100 sentinels at its end."""
    content = untrusted_files.read_object(path)
    model = content.get("model")
    kind = model.get("type") if isinstance(model, dict) else None
    if kind != "Unigram":
        raise Refusal(f"{path} holds a tokenizer of type {checks.shown(kind)}, and only 'Unigram', T5's, becomes a "
                      "vocabulary; train one with `switch-tf vocabulary`, or use the model's spiece.model.")
    pieces = _pieces(model, path)
    kinds = _kinds(content, model, pieces, path)
    ids = {piece: id_ for id_, (piece, _) in enumerate(pieces)}
    proto = sentencepiece_model_pb2.ModelProto(
        pieces=[{"piece": piece, "score": score, "type": kinds.get(piece, "NORMAL")} for piece, score in pieces],
        trainer_spec={
            "model_type": "UNIGRAM", "vocab_size": len(pieces), "byte_fallback": bool(model.get("byte_fallback")),
            "unk_id": model["unk_id"], "unk_piece": pieces[model["unk_id"]][0], "bos_id": -1,
            "pad_id": ids.get(_PAD, -1), "pad_piece": _PAD, "eos_id": ids.get(_END, -1), "eos_piece": _END})
    _set_normalizer(proto.normalizer_spec, content, path)
    serialized = proto.SerializeToString(deterministic=True)
    try:
        sentencepiece.SentencePieceProcessor(model_proto=serialized)
    except RuntimeError as error:
        raise Refusal(f"{path} holds pieces that SentencePiece cannot make a model of ({error}); use the model's "
                      "spiece.model.") from None
    return serialized


def _pieces(model, path):
    """Returns `[(piece, score)]` without the sentinels."""
    vocab = model.get("vocab")
    is_valid = isinstance(vocab, list) and all(
        isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], str) and entry[0]
        and type(entry[1]) in (int, float) and abs(entry[1]) < _MAX_SCORE for entry in vocab)
    if not is_valid or len({piece for piece, _ in vocab}) < len(vocab):
        raise Refusal(f"{path} must list distinct pieces with their scores under \"model\", \"vocab\", and does "
                      "not; download it again.")
    names = [piece for piece, _ in vocab]
    try:
        "".join(names).encode()
    except UnicodeEncodeError:
        raise Refusal(f"{path} has a piece with half of a surrogate pair, which is no character; download it again."
                      ) from None
    held = [piece for piece in names if _SENTINEL.fullmatch(piece)]
    if not held:
        return vocab
    expected = [f"<extra_id_{number}>" for number in reversed(range(_NUM_SENTINELS))]
    if held != expected or names[-_NUM_SENTINELS:] != expected:
        raise Refusal(f"{path} must hold its sentinels as the last {_NUM_SENTINELS} pieces, <extra_id_0> the very "
                      f"last, as T5 does; it has {len(held)}, the first being {held[0]}.")
    return vocab[:-_NUM_SENTINELS]


def _kinds(content, model, pieces, path):
    unk_id, added = model.get("unk_id"), content.get("added_tokens") or []
    if type(unk_id) is not int or not 0 <= unk_id < len(pieces):
        raise Refusal(f"{path} must say with \"unk_id\" which piece stands for unknown text, one of {len(pieces)}, "
                      f"not {checks.shown(unk_id)}.")
    if not isinstance(added, list) or not all(
            isinstance(token, dict) and isinstance(token.get("content"), str) for token in added):
        raise Refusal(f"{path} must list tokens under \"added_tokens\", and does not; download it again.")
    kinds = {piece: "BYTE" for piece, _ in pieces if model.get("byte_fallback") and _BYTE.fullmatch(piece)}
    kinds |= {token["content"]: "CONTROL" if token.get("special") else "USER_DEFINED" for token in added}
    return {**kinds, _PAD: "CONTROL", _END: "CONTROL", pieces[unk_id][0]: "UNKNOWN"}


def _set_normalizer(spec, content, path):
    spec.name, spec.escape_whitespaces, spec.add_dummy_prefix = "identity", True, False
    spec.remove_extra_whitespaces = False
    for step in (*_steps(content.get("normalizer"), "normalizers"),
                 *_steps(content.get("pre_tokenizer"), "pretokenizers")):
        match step:
            case {"type": "Precompiled", "precompiled_charsmap": str() | None as charsmap}:
                try:
                    spec.precompiled_charsmap = base64.b64decode(charsmap or "", validate=True)
                except (binascii.Error, ValueError):
                    raise Refusal(f"{path} has a damaged \"precompiled_charsmap\"; download it again.") from None
                spec.name = "precompiled"
            case {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " " | "▁"} | {"type": "WhitespaceSplit"}:
                spec.remove_extra_whitespaces = True
            case {"type": "Strip"}:
                pass  # SentencePiece then strips too
            case {"type": "Metaspace", "replacement": "▁", **rest}:
                scheme = rest.get("prepend_scheme", "always" if rest.get("add_prefix_space", True) else "never")
                spec.add_dummy_prefix = scheme != "never"
            case _:
                raise Refusal(f"{path} prepares text with the step {checks.shown(step)}, which SentencePiece does "
                              "not have; use the model's spiece.model.")


def _steps(described, key):
    if described is None:
        return []
    if isinstance(described, dict) and described.get("type") == "Sequence" and isinstance(described.get(key), list):
        return [step for part in described[key] for step in _steps(part, key)]
    return [described]
