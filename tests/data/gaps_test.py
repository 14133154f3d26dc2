"""A typed gap has the ids that span corruption leaves, and what is read can be spelt and read again."""

import random

import pytest
import seqio
from sentencepiece import sentencepiece_model_pb2

from switch_tf import data
from switch_tf.sentencepiece_training import train
from switch_tf.tasks import corpora, docs_corpus, vocabularies  # noqa: F401  (registers)

SENTINEL = "<extra_id_{}>"


def _options(content, sentinels=(), **normalizer):
    """The model in `content` with other options, and with sentinels of its own as its last pieces."""
    proto = sentencepiece_model_pb2.ModelProto.FromString(content)
    for name, value in normalizer.items():
        setattr(proto.normalizer_spec, name, value)
    for symbol in sentinels:
        proto.pieces.add(piece=symbol, score=0.0, type=proto.SentencePiece.USER_DEFINED)
    return proto.SerializeToString()


@pytest.fixture(scope="module")
def texts():
    return [text for text in corpora.docs_corpus("validation") if "extra_id" not in text and text.isascii()][:80]


@pytest.fixture(scope="module")
def all_vocabularies(texts, tmp_path_factory):
    """One vocabulary of each kind, by name."""
    folder = tmp_path_factory.mktemp("vocabularies")
    unigram = train(" ".join(texts).split(". "), 400)
    names = [SENTINEL.format(number) for number in reversed(range(100))]
    files = {
        "keeps_blanks": _options(unigram, remove_extra_whitespaces=False),
        "keeps_blanks_adds_none": _options(unigram, remove_extra_whitespaces=False, add_dummy_prefix=False),
        "holds_sentinels": _options(unigram, names),
        "holds_sentinels_keeps_blanks": _options(unigram, names, remove_extra_whitespaces=False),
        "holds_sentinels_after_blanks": _options(unigram, [f"▁{name}" for name in names]),
    }
    found = {"docs_corpus": vocabularies.docs_corpus(), "source_corpus": vocabularies.source_corpus(),
             "bytes": vocabularies.byte()}
    for name, content in files.items():
        (folder / f"{name}.model").write_bytes(content)
        found[name] = data.get_vocabulary(str(folder / f"{name}.model"))
    return found


NAMES = ["docs_corpus", "source_corpus", "bytes", "keeps_blanks", "keeps_blanks_adds_none", "holds_sentinels",
         "holds_sentinels_keeps_blanks", "holds_sentinels_after_blanks"]


def _corrupted(vocabulary, ids, drawn):
    """Ids with two spans taken out, as seqio's span corruption takes them, and the text with gaps typed in their place.

    A user types a gap where the words were, and leaves the blank before them.
    """
    surfaces = data.pieces(vocabulary, ids)
    first, second = sorted(drawn.sample(range(1, len(ids)), 2))
    spans = [(first, min(first + drawn.randint(1, 4), second)), (second, second + drawn.randint(1, 4))]
    kept, typed, place = [], "", 0
    for number, (start, end) in enumerate(spans):
        is_word = surfaces[start].startswith(" ") and not isinstance(vocabulary, seqio.ByteVocabulary)
        kept += [*ids[place:start], vocabulary.vocab_size - 1 - number]
        typed += "".join(surfaces[place:start]) + " " * is_word + SENTINEL.format(number)
        place = end
    return [*kept, *ids[place:]], typed + "".join(surfaces[place:])


def _is_told_apart(vocabulary, ids):
    """Whether the typed form belongs to these ids alone.

    A blank that is a piece by itself before a gap looks like the one that a gap takes, at the end it is left out, and
    bytes of a character are no text.
    """
    surfaces = data.pieces(vocabulary, ids)
    return not any(piece.startswith("<0x") or piece.endswith(" ") and (not after or after.startswith("<extra_id_"))
                   for piece, after in zip(surfaces, [*surfaces[1:], ""], strict=True))


def _as_typed(vocabulary, text):
    """A text without the blank that SentencePiece adds."""
    gaps = data.reading.gaps_of(vocabulary)
    return text.removeprefix(" ") if gaps.adds_blank else text


@pytest.mark.parametrize("name", NAMES)
def test_typed_gaps_have_the_ids_of_span_corruption_and_are_spelt_and_read_again(all_vocabularies, texts, name):
    vocabulary, drawn, typed, expected = all_vocabularies[name], random.Random(0), [], []
    is_bytes = isinstance(vocabulary, seqio.ByteVocabulary)
    for text in texts * 3:
        kept, text = _corrupted(vocabulary, list(vocabulary.encode(text[:300])), drawn)
        if is_bytes or _is_told_apart(vocabulary, kept):
            expected.append(kept)
            typed.append(text if is_bytes else _as_typed(vocabulary, text))
    found = [data.read_text(vocabulary, text) for text in typed]
    assert found == expected and len(found) > 0.6 * len(texts)
    spelt = [data.spell(vocabulary, ids) for ids in found]
    assert [data.read_text(vocabulary, text) for text in spelt] == found
    graph = data.SpellingOps(vocabulary)
    in_graph = graph.read(typed, 400, False).numpy()
    assert [row[:len(ids)].tolist() for row, ids in zip(in_graph, found, strict=True)] == found
    assert [text.decode() for text in graph.spell(in_graph).numpy()] == spelt


def test_the_inputs_and_targets_that_seqio_makes_can_be_typed():
    task = seqio.TaskRegistry.get("docs_corpus_span_corruption")
    vocabulary, num_same, num_typed, num_all = vocabularies.docs_corpus(), 0, 0, 0
    examples = task.get_dataset({"inputs": 128, "targets": 29}, "validation", shuffle=False, seed=0)
    for example in examples.take(150).as_numpy_iterator():
        for ids in (example["inputs"].tolist()[:-1], example["targets"].tolist()[:-1]):
            # A sequence may begin within a word, where a text begins with one.
            pieces = data.pieces(vocabulary, ids)
            ids = ids[next(place for place, piece in enumerate(pieces) if piece.startswith((" ", "<extra_id_"))):]
            num_all += 1
            if _is_told_apart(vocabulary, ids):
                num_typed += 1
                num_same += data.read_text(vocabulary, data.spell(vocabulary, ids)) == ids
    # Two ways to split a word may be equally probable, such as three backquotes: 280 of 281 are the same.
    assert num_same > 0.99 * num_typed and num_typed > 0.9 * num_all


@pytest.mark.parametrize("name", ["bytes", "source_corpus", "keeps_blanks", "keeps_blanks_adds_none",
                                  "holds_sentinels_keeps_blanks"])
def test_a_vocabulary_that_keeps_blanks_spells_whatever_span_corruption_leaves(all_vocabularies, texts, name):
    vocabulary, drawn = all_vocabularies[name], random.Random(1)
    for text in texts:
        kept, _ = _corrupted(vocabulary, list(vocabulary.encode(text[:200])), drawn)
        assert data.read_text(vocabulary, data.spell(vocabulary, kept)) == kept


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("text", [
    "see <extra_id_12> and (<extra_id_0>).", "<extra_id_7>", "a<extra_id_1><extra_id_99>"])
def test_what_is_spelt_out_is_text_and_reads_exactly_as_it_was_typed(all_vocabularies, name, text):
    vocabulary = all_vocabularies[name]
    ids = data.read_text(vocabulary, text, "spelt_out")
    assert max(ids) < vocabulary.vocab_size - 100 and vocabulary.decode(ids) == text


def test_a_vocabulary_without_the_letters_of_a_sentinel_spells_it_with_unknown_ones(texts, tmp_path):
    proto = sentencepiece_model_pb2.ModelProto.FromString(train(" ".join(texts).split(". "), 400))
    for piece in proto.pieces:
        piece.piece = piece.piece.replace("<", "\u4e2d") if piece.type == piece.NORMAL else piece.piece
        piece.type = piece.UNUSED if piece.type == piece.BYTE else piece.type
    proto.trainer_spec.byte_fallback = False  # T5's has none, and no "<"
    (tmp_path / "own.model").write_bytes(proto.SerializeToString())
    vocabulary = data.get_vocabulary(str(tmp_path / "own.model"))
    ids = data.read_text(vocabulary, "a <extra_id_0> b", "spelt_out")
    closest = vocabulary.decode(vocabulary.encode("a <extra_id_0 > b")).replace("0 >", "0>")
    assert vocabulary.unk_id in ids and vocabulary.decode(ids) == closest


@pytest.mark.parametrize("name", NAMES)
def test_whatever_character_stands_beside_a_gap_it_stays_one(all_vocabularies, name):
    vocabulary = all_vocabularies[name]
    for code in [*range(0x20, 0x400), *range(0x2000, 0x2100), 0x338, 0x3000, 0xfeff, 0xff1c, 0x1f600]:
        typed = [f"a <extra_id_0>{chr(code)} b", f"a{chr(code)}<extra_id_0> b"]
        for ids in (data.read_text(vocabulary, text) for text in typed):
            assert ids.count(vocabulary.vocab_size - 1) == 1 and "extra" not in data.spell(
                vocabulary, [id_ for id_ in ids if id_ != vocabulary.vocab_size - 1]), code
