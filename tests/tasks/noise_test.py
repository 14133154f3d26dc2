"""The noise and the metrics of the package equal t5's to the last bit, for the same seeds."""

import functools

import numpy as np
import pytest
import seqio
import tensorflow as tf
from t5.data import preprocessors as t5_preprocessors
from t5.evaluation import metrics as t5_metrics

from switch_tf.tasks import metrics, noise, preprocessors, vocabularies

FEATURES = preprocessors.output_features(vocabularies.byte())
# Empty ones, single tokens, padding in the middle.
DOCUMENTS = [[], [7], list(range(3, 40)), [5, 0, 6], *[[9] * size for size in (1, 2, 700)]]


def _documents(documents=DOCUMENTS):
    return tf.data.Dataset.from_generator(lambda: ({"targets": tokens} for tokens in documents),
                                          output_signature={"targets": tf.TensorSpec([None], tf.int32)})


def _made(objective, lengths, seed, documents):
    with seqio.map_seed_manager(seed):
        made = objective(_documents(documents), sequence_length=lengths, output_features=FEATURES)
        # A later random step draws the same numbers, too.
        made = seqio.map_over_dataset(num_seeds=1)(lambda example, seed: example | {"seed": tf.stack(seed)})(made)
    return [{name: value.tolist() for name, value in example.items()} for example in made.as_numpy_iterator()]


def _t5_masked_tokens(dataset, sequence_length, output_features):
    made = t5_preprocessors.select_random_chunk(dataset, output_features=output_features, max_length=65536)
    made = t5_preprocessors.reduce_concat_tokens(made, batch_size=128)
    made = t5_preprocessors.split_tokens_to_inputs_length(made, sequence_length=sequence_length,
                                                          output_features=output_features)
    return t5_preprocessors.denoise(made, output_features, noise_density=0.15,
                                    inputs_fn=t5_preprocessors.noise_token_to_sentinel,
                                    noise_mask_fn=t5_preprocessors.iid_noise_mask)


@pytest.mark.parametrize(("inputs", "targets", "mean", "seeds"), [
    (128, 29, 3.0, (0,)), (10, 8, 3.0, (0,)),
    *(pytest.param(*case, (0,), marks=pytest.mark.slow) for case in ((300, 80, 20.0), (64, 60, 1.0))),
    *(pytest.param(*case, range(2), marks=pytest.mark.exhaustive) for case in (
        (10, 8, 3.0), (512, 114, 3.0), (172, 40, 3.0), (300, 80, 20.0), (64, 60, 1.0)))])
def test_span_corruption_is_t5s(inputs, targets, mean, seeds):
    lengths = {"inputs": inputs, "targets": targets}
    own, theirs = (functools.partial(module.span_corruption, mean_noise_span_length=mean)
                   for module in (preprocessors, t5_preprocessors))
    for seed in seeds:
        assert _made(own, lengths, seed, DOCUMENTS) == _made(theirs, lengths, seed, DOCUMENTS)


def test_long_documents_are_cut_to_t5s_piece():
    lengths, documents = {"inputs": 8192, "targets": 2500}, [[3 + i % 250 for i in range(140_000)], [7]]
    own, theirs = (functools.partial(module.span_corruption, mean_noise_span_length=20.0)
                   for module in (preprocessors, t5_preprocessors))
    starts = set()
    tf.random.set_seed(2)  # which piece is drawn depends on it as well, and other tests set it
    for seed in range(2):
        made = _made(own, lengths, seed, documents)
        assert made == _made(theirs, lengths, seed, documents)
        starts.add(made[0]["inputs"][0])
    assert len(starts) > 1


def test_masked_tokens_are_t5s():
    lengths = {"inputs": 100, "targets": 100}
    assert _made(preprocessors.masked_tokens, lengths, 1, DOCUMENTS) == _made(_t5_masked_tokens, lengths, 1, DOCUMENTS)


@pytest.mark.parametrize("density", [0.15, 0.5])
def test_masks_are_t5s_at_every_length(density):
    def masks(size):
        seeds = tf.unstack(tf.random.experimental.stateless_split([size, 3], 2))
        own = noise.span_mask(size, seeds, density, 3.0)
        return own, t5_preprocessors.random_spans_noise_mask(size, density, seeds, 3.0)

    both = tf.function(masks, input_signature=[tf.TensorSpec([], tf.int32)], autograph=False)
    for size in [*range(1, 40), 141, 190, 568]:
        own, theirs = both(size)
        np.testing.assert_array_equal(own, theirs, str(size))


def test_segments_have_t5s_length():
    for inputs in range(2, 600):
        for mean in (1.0, 3.0, 20.0):
            theirs, _ = t5_preprocessors.random_spans_helper(inputs, 0.15, mean, 1, 1)
            assert noise.segment_length(inputs, 0.15, mean) == theirs, (inputs, mean)


def test_inputs_and_targets_of_two_vocabularies_are_refused():
    features = FEATURES | {"inputs": seqio.Feature(vocabularies.docs_corpus())}
    with pytest.raises(ValueError, match="inputs and targets of one vocabulary"):
        noise.add_noise(_documents(), features, None, None)


TEXTS = ["The cat, and a dog.", "a", "", "An apple . Two `pears' . end", "Grüße _an_ alle", "the big dog",
         "one two two"]
PREDICTIONS = ["the cat and dog", "", "x", "An apple. Two pears . end", "grüße an alle", "big dog", "two one two two"]


@pytest.mark.parametrize("name", ["accuracy", "sequence_accuracy", "bleu", "rouge", "edit_distance"])
def test_metrics_of_texts_are_t5s(name):
    values = []
    for module in (metrics, t5_metrics):
        np.random.seed(1)  # of rouge's bootstrap
        values.append(getattr(module, name)(TEXTS, PREDICTIONS))
    assert values[0] == values[1]


@pytest.mark.parametrize("name", ["squad", "trivia_qa"])
def test_metrics_of_answers_are_t5s(name):
    targets = [[text, text[4:]] for text in TEXTS]
    assert getattr(metrics, name)(targets, PREDICTIONS) == getattr(t5_metrics, name)(targets, PREDICTIONS)


def test_metrics_of_numbers_are_t5s():
    targets, predictions = [0, 1, 2, 2, 1], [0, 2, 2, 1, 1]
    for name in ("accuracy", "pearson_corrcoef", "spearman_corrcoef"):
        assert getattr(metrics, name)(targets, predictions) == getattr(t5_metrics, name)(targets, predictions)
    own, theirs = (module.mean_multiclass_f1(num_classes=4) for module in (metrics, t5_metrics))
    assert own(targets, predictions) == theirs(targets, predictions) and own.__name__ == "mean_4class_f1"
