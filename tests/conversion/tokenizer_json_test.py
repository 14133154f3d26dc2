"""tokenizer.json as a SentencePiece model; its ids were compared with those of transformers 5.23 by running both."""

import base64
import json

import pytest
import sentencepiece
from sentencepiece import sentencepiece_model_pb2

from switch_tf import data
from switch_tf.conversion import source_vocabulary
from switch_tf.sentencepiece_training import train
from tests.conversion.shared import refusal

SENTENCES = [f"a line of text, number {number}, with some words {number * 7}" for number in range(200)]
TEXTS = [*SENTENCES[:20], "  two  blanks ", "ﬁ ½ é ① 東", "tab\there", "", "x" * 100]
SENTINELS = [[f"<extra_id_{number}>", 0.0] for number in range(99, -1, -1)]


@pytest.fixture(scope="module")
def trained():
    return sentencepiece_model_pb2.ModelProto.FromString(train(SENTENCES, 400))


@pytest.fixture
def write(trained, tmp_path):
    """A function that writes the tokenizer.json that transformers 5 writes for a T5 with this SentencePiece model."""
    def write(model=(), **changes):
        charsmap = base64.b64encode(trained.normalizer_spec.precompiled_charsmap).decode()
        path = tmp_path / "tokenizer.json"
        path.write_text(json.dumps({
            "added_tokens": [{"id": id_, "content": content, "special": True}
                             for id_, content in enumerate(("<pad>", "</s>", "<unk>"))],
            "normalizer": {"type": "Precompiled", "precompiled_charsmap": charsmap},
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
                {"type": "WhitespaceSplit"}, {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always"}]},
            "model": {"type": "Unigram", "unk_id": 2, "byte_fallback": True, "vocab": pieces_of(trained) + SENTINELS,
                      **dict(model)}, **changes}))
        return path

    return write


def pieces_of(trained):
    return [[piece.piece, piece.score] for piece in trained.pieces]


def test_ids_are_those_of_the_model_that_it_was_written_from(trained, write, tmp_path):
    path = tmp_path / "spiece.model"
    path.write_bytes(source_vocabulary.sentencepiece_model(write()))
    again = sentencepiece.SentencePieceProcessor(model_file=str(path))
    original = sentencepiece.SentencePieceProcessor(model_proto=trained.SerializeToString())
    assert again.encode(TEXTS) == original.encode(TEXTS)
    assert again.decode(again.encode(TEXTS)) == original.decode(original.encode(TEXTS))
    vocabulary = data.get_vocabulary(str(path))
    assert (vocabulary.vocab_size, vocabulary.eos_id, vocabulary.pad_id, vocabulary.extra_ids) == (500, 1, 0, 100)
    assert vocabulary.encode("<extra_id_0>")[-1] == 499


def test_without_sentinels_in_the_pieces_and_with_other_settings(trained, write):
    path = write({"vocab": pieces_of(trained), "byte_fallback": False}, normalizer=None,
                 pre_tokenizer={"type": "Metaspace", "replacement": "▁", "prepend_scheme": "never"})
    made = sentencepiece_model_pb2.ModelProto.FromString(source_vocabulary.sentencepiece_model(path))
    assert len(made.pieces) == 400 and not made.trainer_spec.byte_fallback
    spec = made.normalizer_spec
    assert (spec.add_dummy_prefix, spec.remove_extra_whitespaces, spec.precompiled_charsmap) == (False, False, b"")


@pytest.mark.parametrize(("changes", "message"), [
    ({"model": {"type": "BPE"}}, "holds a tokenizer of type 'BPE', and only 'Unigram', T5's, becomes a vocabulary"),
    ({"model": {"vocab": [["a", "b"]]}}, "must list distinct pieces with their scores"),
    ({"model": {"vocab": [["a", 10**400]]}}, "must list distinct pieces"),
    ({"model": {"vocab": [["a", 0], ["a", 0]]}}, "must list distinct pieces"),
    ({"model": {"vocab": {"a": 0}}}, "must list distinct pieces"),
    ({"model": {"vocab": [["\ud800a", 0]]}}, "has a piece with half of a surrogate pair"),
    ({"model": {"vocab": [["<unk>", 0], *SENTINELS[1:]]}}, "must hold its sentinels as the last 100 pieces"),
    ({"model": {"vocab": [*SENTINELS, ["<unk>", 0]]}}, "must hold its sentinels as the last 100 pieces"),
    ({"model": {"unk_id": 1000}}, "which piece stands for unknown text, one of 400, not 1000"),
    ({"model": {"unk_id": None}}, "which piece stands for unknown text, one of 400, not None"),
    ({"added_tokens": {"a": 1}}, 'must list tokens under "added_tokens"'),
    ({"normalizer": {"type": "Lowercase"}}, "with the step {'type': 'Lowercase'}, which SentencePiece does not have"),
    ({"pre_tokenizer": "words"}, "with the step 'words'"),
    ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "é"}}, 'a damaged "precompiled_charsmap"')])
def test_what_has_no_counterpart_is_refused(changes, message, write):
    assert message in refusal(source_vocabulary.sentencepiece_model, write(**changes))


@pytest.mark.parametrize("content", ["[" * 10**5, "{}", "[]", "", '{"model": []}'])
def test_damaged_files_are_refused(content, tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    assert "tokenizer.json" in refusal(source_vocabulary.sentencepiece_model, path)
