"""A run may choose another vocabulary for any task: by name, or by the path of a SentencePiece model."""

import io

import pytest
import sentencepiece
import seqio

from switch_tf import data
from switch_tf.data.vocabularies import get_provider
from switch_tf.sentencepiece_training import train
from switch_tf.tasks import docs_corpus, sentinels, vocabularies  # noqa: F401  (registers)

LENGTHS = {"inputs": 32, "targets": 16}
SENTENCES = [f"a line of text, number {number}, with some words {number * 7}" for number in range(200)]


def _trained(**options):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(SENTENCES), model_writer=model, minloglevel=2,
                                             **{"vocab_size": 60, "model_type": "bpe", **options})
    return model.getvalue()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The path of a vocabulary of 400 pieces, trained as `switch-tf vocabulary` does."""
    path = tmp_path_factory.mktemp("vocabulary") / "own.model"
    path.write_bytes(train(SENTENCES, 400))
    return str(path)


def test_a_task_is_read_with_the_vocabulary_that_is_chosen_and_stays_as_it_is(model):
    own = data.get_vocabulary(model)
    assert data.vocabulary_size("docs_corpus_span_corruption", model) == own.vocab_size == 500
    description = data.DatasetDescription("docs_corpus_span_corruption", LENGTHS, 2, "validation", vocabulary=model)
    tokens = next(data.get_dataset(description).as_numpy_iterator())["encoder_input_tokens"]
    assert (tokens == 499).any(axis=1).all() and tokens.max() == 499  # the first sentinel
    words = own.decode(tokens[0][tokens[0] < 400].tolist()).split()
    assert len(words) > 3
    assert seqio.TaskRegistry.get("docs_corpus_span_corruption").output_features["inputs"].vocabulary is (
        vocabularies.docs_corpus())


def test_every_name_is_that_of_the_function_and_one_object():
    assert {name: data.get_vocabulary(name) for name in ("docs_corpus", "source_corpus", "bytes", "t5", "mt5")} == {
        "docs_corpus": vocabularies.docs_corpus(), "source_corpus": vocabularies.source_corpus(),
        "bytes": vocabularies.byte(), "t5": vocabularies.t5(), "mt5": vocabularies.mt5()}
    assert data.vocabulary_size("docs_corpus_span_corruption", "bytes") == 359
    assert data.vocabulary_fingerprint("docs_corpus_span_corruption", "bytes") == ["ByteVocabulary of 359 ids"]


@pytest.mark.slow
def test_masked_tokens_are_the_last_id_of_the_vocabulary_that_is_chosen():
    description = data.DatasetDescription("docs_corpus_masked_tokens", {"inputs": 32, "targets": 32}, 2, "validation",
                                          encoder_only=True, vocabulary="bytes")
    batch = next(data.get_dataset(description).as_numpy_iterator())
    masked = batch["encoder_loss_weights"] == 1
    assert masked.any() and (batch["encoder_input_tokens"][masked] == 358).all()


def test_the_tasks_of_a_mixture_and_of_mixtures_in_it_take_it_too_with_their_rates():
    seqio.MixtureRegistry.add("inner", ["docs_corpus_span_corruption"], default_rate=1)
    seqio.MixtureRegistry.add("outer", [("inner", 3), ("docs_corpus_span_corruption", 2),
                                        ("docs_corpus_span_corruption_bytes", 5)])
    try:
        mixture = get_provider("outer", "bytes")
        assert data.vocabulary_size("outer", "bytes") == 359
        assert {task.name: mixture.get_rate(task) for task in mixture.tasks} == {
            "docs_corpus_span_corruption": 5, "docs_corpus_span_corruption_bytes": 5}
        assert data.vocabulary_size("outer") == 4096
    finally:
        for name in ("inner", "outer"):
            seqio.MixtureRegistry.remove(name)


def test_a_task_whose_source_has_ids_takes_none():
    features = {name: seqio.Feature(seqio.PassThroughVocabulary(9)) for name in ("inputs", "targets")}
    seqio.TaskRegistry.add("of_ids", seqio.FunctionDataSource(lambda split, shuffle_files: None, ["train"]), features)
    try:
        with pytest.raises(ValueError, match="'of_ids' has ids from its source, not text, so it takes no other"):
            data.vocabulary_size("of_ids", "bytes")
    finally:
        seqio.TaskRegistry.remove("of_ids")


# Sentinels.


def test_a_file_that_holds_sentinels_gets_no_others(tmp_path):
    names = [f"{start}<extra_id_{number}>" for start in ("", "▁") for number in reversed(range(100))]
    for start, symbols in ((0, names[:100]), (100, names[100:])):
        path = tmp_path / f"{start}.model"
        # SentencePiece puts its user's symbols before all pieces, so they are moved as mT5's were.
        path.write_bytes(_with_last(_trained(pad_id=0, eos_id=1, unk_id=2, bos_id=-1), symbols))
        vocabulary = data.get_vocabulary(str(path))
        assert vocabulary.vocab_size == 160
        assert vocabulary.encode("a <extra_id_0>")[-1] == 159
        features = {"targets": seqio.Feature(vocabulary)}
        [spelt] = sentinels.spell_out(seqio.preprocessors.tokenize(
            _texts("a <extra_id_7>"), output_features=features), features).as_numpy_iterator()
        assert spelt["targets"].max() < 60


def _texts(text):
    import tensorflow as tf

    return tf.data.Dataset.from_tensors({"targets": text})


def _with_last(content, symbols):
    from sentencepiece import sentencepiece_model_pb2

    proto = sentencepiece_model_pb2.ModelProto.FromString(content)
    for symbol in symbols:
        proto.pieces.add(piece=symbol, score=0.0, type=proto.SentencePiece.USER_DEFINED)
    return proto.SerializeToString()


@pytest.mark.parametrize(("content", "message"), [
    (None, r"'nowhere.model' is no registered vocabulary \(bytes, docs_corpus, mt5, source_corpus, t5\), and no "
           "SentencePiece model that can be read: there is no such file"),
    (b"", "is no SentencePiece model, or a damaged one; `switch-tf vocabulary` trains one"),
    (b"hello\nworld\n" * 99, "is no SentencePiece model, or a damaged one"),
    (lambda: _trained()[:500], "is no SentencePiece model, or a damaged one"),
    (lambda: _trained(), "needs padding at id 0 and an end of sequence, and VOCABULARY .* has <unk> 0, <s> 1, </s> 2"),
    (lambda: _trained(pad_id=0, unk_id=1, bos_id=-1, eos_id=-1), "needs padding at id 0 .* has <unk> 1, <pad> 0"),
    (lambda: _trained(pad_id=0, unk_id=2, bos_id=-1, eos_id=1, user_defined_symbols=["<extra_id_0>"]),
     "holds <extra_id_0> as id 3 of 60; sentinels have to be the last 100 ids, <extra_id_0> the very last"),
])  # fmt: skip
def test_a_file_that_cannot_serve_is_refused_in_a_sentence(tmp_path, monkeypatch, content, message):
    monkeypatch.chdir(tmp_path)
    if content is None:
        path = "nowhere.model"
    else:
        (tmp_path / "own.model").write_bytes(content() if callable(content) else content)
        path = str(tmp_path / "own.model")
    with pytest.raises(ValueError, match=message) as raised:
        data.check_vocabulary("docs_corpus_span_corruption", 4096, path)
    assert "\n" not in str(raised.value)


def test_a_folder_and_a_misspelt_name_are_refused(tmp_path):
    with pytest.raises(ValueError, match="no SentencePiece model that can be read"):
        data.get_vocabulary(str(tmp_path))
    with pytest.raises(ValueError, match=r"Did you mean 'docs_corpus'\?"):
        data.get_vocabulary("docs_corpu")


def test_a_model_whose_embedding_is_too_small_for_it_is_refused(model):
    with pytest.raises(ValueError, match=r"vocab_size 499, but 'docs_corpus_span_corruption' with VOCABULARY "
                                         r"'.*own.model' has token ids up to 499; set SwitchConfig.vocab_size to at "
                                         r"least 500"):
        data.check_vocabulary("docs_corpus_span_corruption", 499, model)
    data.check_vocabulary("docs_corpus_span_corruption", 500, model)
