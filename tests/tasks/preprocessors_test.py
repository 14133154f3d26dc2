import pytest
import seqio
import tensorflow as tf

from switch_tf.tasks import preprocessors, vocabularies

FEATURES = preprocessors.output_features(vocabularies.byte())
FIRST_SENTINEL = 358  # the last of 3 + 256 + 100 ids; the others count down
LAST_SENTINEL = 259
EOS = 1


def run(objective, tokens, inputs_length, targets_length, seed=0):
    """Returns [(inputs, targets), ...] made from one document of `tokens`."""
    dataset = tf.data.Dataset.from_tensors({"targets": tf.constant(tokens, tf.int32)})
    lengths = {"inputs": inputs_length, "targets": targets_length}
    *_, objective, append_eos = preprocessors.pretraining(objective)
    with seqio.map_seed_manager(seed):
        dataset = objective(dataset, sequence_length=lengths, output_features=FEATURES)
        dataset = append_eos(dataset, output_features=FEATURES, sequence_length=lengths)
    return [(e["inputs"].tolist(), e["targets"].tolist()) for e in dataset.as_numpy_iterator()]


def document(num_tokens):
    return [3 + i % 256 for i in range(num_tokens)]


def spans_by_sentinel(targets):
    spans = {}
    for token in targets:
        if LAST_SENTINEL <= token <= FIRST_SENTINEL:
            spans[token] = []
            current = spans[token]
        else:
            current.append(token)
    return spans


def test_inputs_and_targets_of_span_corruption_give_the_text_back():
    tokens = document(500)
    restored = []
    for inputs, targets in run(preprocessors.span_corruption, tokens, 128, 29):
        assert inputs[-1] == targets[-1] == EOS
        spans = spans_by_sentinel(targets[:-1])
        for token in inputs[:-1]:
            restored += spans.pop(token) if token in spans else [token]
        assert not spans
    assert restored == tokens


def test_a_full_sequence_fills_both_lengths():
    # 141 tokens: round(0.15 * 141) = 21 are dropped in round(21 / 3) = 7 spans; 120 + 7 + 1 = 128 and 21 + 7 + 1 = 29
    [(inputs, targets)] = run(preprocessors.span_corruption, document(141), 128, 29)
    assert (len(inputs), len(targets)) == (128, 29)
    sentinels = [FIRST_SENTINEL - i for i in range(7)]
    assert [token for token in inputs if token >= LAST_SENTINEL] == sentinels
    assert [token for token in targets if token >= LAST_SENTINEL] == sentinels
    assert targets[0] == FIRST_SENTINEL
    assert inputs[0] == 3  # a text starts with what is kept


def test_no_target_is_cut_off_where_float32_rounds_up():
    # Inputs of 172 tokens hold 190: 0.15 * 190 = 28.5 is 28 for T5's helper and 29, in 10 spans, for its mask.
    [(inputs, targets)] = run(preprocessors.span_corruption, document(190), 172, 40)
    assert len(inputs) == 190 - 29 + 10 + 1
    assert len(targets) == 29 + 10 + 1
    with pytest.raises(ValueError, match="makes targets of 40 tokens"):
        run(preprocessors.span_corruption, document(190), 172, 39)


def test_noise_depends_on_the_seed_alone():
    first, again, other = (run(preprocessors.span_corruption, document(141), 128, 29, seed) for seed in (0, 0, 1))
    assert first == again
    assert first != other


def test_the_lengths_of_the_papers_are_the_shortest_that_are_accepted():
    for inputs, targets in ((128, 29), (512, 114), (1024, 229)):
        preprocessors.check_span_corruption({"inputs": inputs, "targets": targets})
        with pytest.raises(ValueError, match=rf'makes targets of {targets} tokens.*"targets": {targets}\}}'):
            preprocessors.check_span_corruption({"inputs": inputs, "targets": targets - 1})


def test_more_spans_than_sentinels_are_refused():
    preprocessors.check_span_corruption({"inputs": 1809, "targets": 500})
    with pytest.raises(ValueError, match=r"Inputs of 1810 tokens have 101 spans"):
        preprocessors.check_span_corruption({"inputs": 1810, "targets": 500})
    with pytest.raises(ValueError, match=r"Inputs of 2048 tokens have 114 spans of 3 tokens.*has 100 sentinels"):
        preprocessors.check_span_corruption({"inputs": 2048, "targets": 500})
    preprocessors.check_span_corruption({"inputs": 2048, "targets": 500}, mean_noise_span_length=20.0)


def test_inputs_too_short_for_a_span_are_refused():
    with pytest.raises(ValueError, match=r"Inputs of 8 tokens are too short.*at least 10 tokens"):
        preprocessors.check_span_corruption({"inputs": 8, "targets": 8})
    preprocessors.check_span_corruption({"inputs": 10, "targets": 8})


def test_masked_tokens_keep_every_position():
    tokens = document(500)
    examples = run(preprocessors.masked_tokens, tokens, 128, 128)
    # 127 tokens and the end of sequence in each: 127 + 127 + 127 + 119 = 500
    assert [len(targets) for _, targets in examples] == [128, 128, 128, 120]
    assert [token for _, targets in examples for token in targets[:-1]] == tokens
    masked = 0
    for inputs, targets in examples:
        assert len(inputs) == len(targets)
        assert inputs[-1] == targets[-1] == EOS
        for source, target in zip(inputs, targets, strict=True):
            assert source in (target, FIRST_SENTINEL)
            masked += source == FIRST_SENTINEL
    assert 45 <= masked <= 105  # 75 expected of 500, standard deviation 8


def test_text_becomes_tokens_without_copies_of_the_text():
    dataset = tf.data.Dataset.from_tensors({"text": "ab" * 100, "url": "x"})
    rekey, tokenize = preprocessors.pretraining(preprocessors.masked_tokens)[:2]
    dataset = tokenize(rekey(dataset), output_features=FEATURES)
    [example] = dataset.as_numpy_iterator()
    assert list(example) == ["targets"]
    assert example["targets"].tolist() == [97 + 3, 98 + 3] * 100
