"""Batches of seqio features: their content and order, and the resumption of reading."""

import json
import subprocess
import sys

import numpy as np
import pytest
import seqio
import tensorflow as tf

from switch_tf import data
from switch_tf.tasks import corpora, docs_corpus

VOCABULARY = seqio.PassThroughVocabulary(50, eos_id=1)
LENGTHS = {"inputs": 4, "targets": 4}
SPAN_LENGTHS = {"inputs": 64, "targets": 64}


def add_counting_task(name, first, count):
    """Registers a task with the examples `inputs [n, n], targets [n]` for `count` numbers n from `first`."""

    def read(split, shuffle_files, seed=None):
        numbers = tf.data.Dataset.range(first, first + count)
        return numbers.map(lambda n: {"inputs": tf.cast([n, n], tf.int32), "targets": tf.cast([n], tf.int32)})

    seqio.TaskRegistry.add(
        name,
        source=seqio.FunctionDataSource(read, ["train", "validation"], {"train": count, "validation": count}),
        output_features={key: seqio.Feature(VOCABULARY, add_eos=False) for key in ("inputs", "targets")},
        preprocessors=[],
        metric_fns=[],
        shuffle_buffer_size=5,
    )


@pytest.fixture(scope="module", autouse=True)
def tasks():
    add_counting_task("five_numbers", 10, 5)
    add_counting_task("three_numbers", 30, 3)
    seqio.MixtureRegistry.add("eight_numbers", [("five_numbers", 5), ("three_numbers", 1)])
    yield
    seqio.MixtureRegistry.remove("eight_numbers")
    seqio.TaskRegistry.remove("five_numbers")
    seqio.TaskRegistry.remove("three_numbers")


def describe_and_get(name, lengths, *args, **options):
    return data.get_dataset(data.DatasetDescription(name, lengths, *args, **options))


def read(name, batches=None, lengths=LENGTHS, **options):
    """Returns the first batches as dicts of NumPy arrays, or all of a data set that ends."""
    dataset = describe_and_get(name, lengths, **options)
    return list(dataset.take(-1 if batches is None else batches).as_numpy_iterator())


def numbers(batches):
    """Returns the targets that are not padding, in order."""
    targets = np.concatenate([batch["decoder_target_tokens"].ravel() for batch in batches])
    return targets[targets > 0].tolist()


def are_equal(batches, others):
    return len(batches) == len(others) and all(
        set(a) == set(b) and all((a[name] == b[name]).all() for name in a) for a, b in zip(batches, others, strict=True)
    )


# Features.


def test_an_example_becomes_seqios_features():
    [batch] = read("five_numbers", 1, batch_size=1, split="validation")
    assert {name: tokens.tolist() for name, tokens in batch.items()} == {
        "encoder_input_tokens": [[10, 10, 0, 0]],
        "decoder_target_tokens": [[10, 0, 0, 0]],
        "decoder_input_tokens": [[0, 10, 0, 0]],
        "decoder_loss_weights": [[1, 0, 0, 0]],
    }


def test_packing_puts_two_examples_in_one_sequence():
    [batch] = read("five_numbers", 1, batch_size=1, split="validation", pack=True)
    # Inputs of two tokens in a length of four: two examples a sequence.
    assert {name: tokens.tolist() for name, tokens in batch.items()} == {
        "encoder_input_tokens": [[10, 10, 11, 11]],
        "encoder_segment_ids": [[1, 1, 2, 2]],
        "encoder_positions": [[0, 1, 0, 1]],
        "decoder_target_tokens": [[10, 11, 0, 0]],
        "decoder_input_tokens": [[0, 0, 0, 0]],
        "decoder_loss_weights": [[1, 1, 0, 0]],
        "decoder_segment_ids": [[1, 2, 0, 0]],
        "decoder_positions": [[0, 0, 0, 0]],
    }


@pytest.mark.parametrize("split", ["train", "validation"])
@pytest.mark.parametrize("pack", [False, True])
def test_shapes_are_static_and_tokens_int32(split, pack):
    dataset = describe_and_get("five_numbers", {"inputs": 4, "targets": 3}, 6, split=split, pack=pack)
    for name, spec in dataset.element_spec.items():
        assert spec.dtype == tf.int32
        assert spec.shape.as_list() == [6, 4 if name.startswith("encoder") else 3]


def test_an_encoder_alone_is_asked_for_the_masked_tokens():
    lengths = {"inputs": 32, "targets": 32}
    [batch] = read("docs_corpus_masked_tokens", 1, lengths, batch_size=16, encoder_only=True)
    inputs, targets = batch["encoder_input_tokens"], batch["encoder_target_tokens"]
    assert (batch["encoder_loss_weights"] == (inputs == 4095)).all()
    assert (inputs == targets)[inputs != 4095].all()
    assert 0.08 < batch["encoder_loss_weights"].mean() < 0.22  # 15 % of 16 * 31 tokens


# Order.


def test_training_data_are_repeated_and_shuffled_anew():
    found = numbers(read("five_numbers", batch_size=1, batches=50))
    assert set(found) == {10, 11, 12, 13, 14}
    assert found[:25] != found[25:]


def test_every_epoch_of_the_docs_corpus_is_a_new_order_of_all_documents():
    dataset = docs_corpus.source().get_dataset("validation", shuffle=True, seed=1).repeat(2)
    texts = [example["text"] for example in dataset.as_numpy_iterator()]
    count = corpora.NUM_DOCUMENTS["validation"]
    first, second = texts[:count], texts[count:]
    assert first != second
    assert sorted(first) == sorted(second) == sorted(text.encode() for text in corpora.docs_corpus("validation"))


def test_other_splits_are_read_once_and_in_order():
    assert numbers(read("five_numbers", batch_size=2, split="validation")) == [10, 11, 12, 13, 14]


def test_the_last_batch_is_filled_with_rows_that_do_not_count():
    batches = read("five_numbers", batch_size=2, split="validation")
    assert [batch["decoder_loss_weights"].sum() for batch in batches] == [2, 2, 1]
    assert {name: tokens[1].tolist() for name, tokens in batches[-1].items()} == dict.fromkeys(batches[-1], [0] * 4)


def test_every_training_example_is_read_as_often_as_the_others():
    found = numbers(read("five_numbers", batch_size=5, batches=20))
    # 105 examples, 21 of each, went through a shuffle buffer of five, which holds five of them yet.
    assert all(16 <= found.count(number) <= 21 for number in range(10, 15))


def test_one_pass_over_a_mixture_ends_with_its_last_task():
    found = numbers(read("eight_numbers", batch_size=3, split="validation"))
    assert sorted(found) == [10, 11, 12, 13, 14, 30, 31, 32]
    assert found == numbers(read("eight_numbers", batch_size=3, split="validation"))


def test_a_mixture_is_drawn_by_its_rates():
    found = numbers(read("eight_numbers", batch_size=60, batches=20))
    assert len(found) == 1200
    assert 150 < sum(number >= 30 for number in found) < 250  # 1 in 6


def test_validation_noise_is_the_same_every_time():
    dataset = describe_and_get("docs_corpus_span_corruption", SPAN_LENGTHS, 4, split="validation").take(3)
    assert are_equal(list(dataset.as_numpy_iterator()), list(dataset.as_numpy_iterator()))


def test_shards_of_the_docs_corpus_divide_its_documents():
    source = docs_corpus.source()

    def texts(shard_info):
        dataset = source.get_dataset("validation", shuffle=True, seed=3, shard_info=shard_info)
        return [example["text"] for example in dataset.as_numpy_iterator()]

    shards = [texts(seqio.ShardInfo(index, 3)) for index in range(3)]
    assert sorted(sum(shards, [])) == sorted(texts(None))
    assert len(texts(None)) == corpora.NUM_DOCUMENTS["validation"]


# Resuming. Another process runs the bottom of this file, which restores the iterators that this one saved.

RESUMED = {
    "unpacked": ("docs_corpus_span_corruption", {}),
    "packed mixture": ("docs_corpus_of_both_objectives", {"pack": True}),
}


def read_and_restore(folder, kind, is_saving):
    """Returns {"start": the first batches, "rest": those after the saved position}."""
    if "docs_corpus_of_both_objectives" not in seqio.MixtureRegistry.names():
        seqio.MixtureRegistry.add(
            "docs_corpus_of_both_objectives",
            ["docs_corpus_span_corruption", "docs_corpus_masked_tokens"],
            default_rate=seqio.mixing_rate_num_examples,
        )
    name, options = RESUMED[kind]
    iterator = iter(describe_and_get(name, SPAN_LENGTHS, 4, seed=5, **options))
    result = {"start": take(iterator, 4)}
    checkpoint = tf.train.Checkpoint(iterator=iterator)
    if is_saving:
        checkpoint.write(f"{folder}/iterator")
    else:
        checkpoint.read(f"{folder}/iterator").assert_consumed()
    result["rest"] = take(iterator, 4)
    return result


def take(iterator, count):
    return [{name: tokens.numpy().tolist() for name, tokens in next(iterator).items()} for _ in range(count)]


@pytest.fixture(scope="module", params=RESUMED)
def saved_and_restored(request, tmp_path_factory):
    """Returns what this process and another one read."""
    folder = tmp_path_factory.mktemp("iterators")
    saved = read_and_restore(folder, request.param, is_saving=True)
    subprocess.run([sys.executable, "-P", __file__, str(folder), request.param], check=True)
    return saved, json.loads((folder / "restored.json").read_text())


@pytest.mark.slow
def test_a_restored_iterator_goes_on_bit_for_bit(saved_and_restored):
    saved, restored = saved_and_restored
    assert saved["rest"] == restored["rest"]
    assert saved["rest"] != saved["start"]


@pytest.mark.slow
def test_another_process_reads_the_same_batches(saved_and_restored):
    saved, restored = saved_and_restored
    assert saved["start"] == restored["start"]


def test_the_batches_depend_on_their_own_seed_and_not_on_the_global_one():
    found = []
    for global_seed, seed in ((1, 5), (2, 5), (2, 6)):
        tf.random.set_seed(global_seed)
        found.append(read("docs_corpus_span_corruption", 2, SPAN_LENGTHS, batch_size=4, seed=seed))
    first, again, other = found
    assert are_equal(first, again) and not are_equal(first, other)


def test_a_small_task_is_resumed_within_a_later_epoch(tmp_path):
    iterator = iter(describe_and_get("five_numbers", LENGTHS, 2))
    take(iterator, 7)
    path = tf.train.Checkpoint(iterator=iterator).write(str(tmp_path / "iterator"))
    expected = take(iterator, 10)
    iterator = iter(describe_and_get("five_numbers", LENGTHS, 2))
    tf.train.Checkpoint(iterator=iterator).read(path).assert_consumed()
    assert take(iterator, 10) == expected


# Refusals.


def test_a_split_that_a_task_does_not_have_is_refused():
    with pytest.raises(ValueError, match="'five_numbers' has the splits train, validation, received 'test'"):
        describe_and_get("five_numbers", LENGTHS, 2, split="test")


def test_targets_too_short_for_the_noise_are_refused():
    with pytest.raises(ValueError, match=r'targets of 29 tokens, received a length of 16; set .*"targets": 29'):
        describe_and_get("docs_corpus_span_corruption", {"inputs": 128, "targets": 16}, 2)


@pytest.mark.parametrize(
    ("features", "message"),
    [
        (("inputs", "targets"), r"Packing needs .* \(rank 1\), received ranks \{'inputs': 2, 'targets': 2\}"),
        (("targets",), "reads inputs and targets, but 'spectrograms' has only targets"),
    ],
)
def test_features_that_the_converter_cannot_use_are_refused(features, message):
    source = seqio.FunctionDataSource(lambda split, shuffle_files: None, ["train"])
    spectrogram = seqio.ContinuousFeature(dtype=tf.float32, rank=2)
    seqio.TaskRegistry.add("spectrograms", source, dict.fromkeys(features, spectrogram), [], metric_fns=[])
    try:
        with pytest.raises(ValueError, match=message):
            describe_and_get("spectrograms", LENGTHS, 2, pack=True)
    finally:
        seqio.TaskRegistry.remove("spectrograms")


if __name__ == "__main__":
    with open(f"{sys.argv[1]}/restored.json", "w") as stream:
        json.dump(read_and_restore(*sys.argv[1:], is_saving=False), stream)


@pytest.mark.parametrize("split", ["train", "validation"])
def test_a_pipeline_is_in_order_and_not_tuned(split):
    """A tuner's thread can end a minute late, and with it the deletion of an iterator."""
    options = describe_and_get("eight_numbers", LENGTHS, split=split, batch_size=2).options()
    assert options.deterministic is True and options.autotune.enabled is False
