"""A position that is saved while prefetched examples span the end of a pass is resumed exactly."""

import time

import pytest
import seqio
import tensorflow as tf

from switch_tf import context, data
from switch_tf.data import cache_files, cached_tasks, example_files
from switch_tf.data.cache_files import CorruptRecords
from switch_tf.data.vocabularies import count_passes
from switch_tf.tasks.in_memory import InMemorySource
from switch_tf.tasks.text_source import TextFilesSource

COUNT = 48  # twelve batches of four


def shuffled(key):
    return tf.data.Dataset.from_tensor_slices(tf.random.experimental.stateless_shuffle(tf.range(COUNT), seed=key))


def take(iterator, count):
    return [next(iterator).numpy().tolist() for _ in range(count)]


def read_to_train(make_examples):
    """As seqio and a run read a source: repeated, shuffled, in batches, ahead of the one that waits for them."""
    with context.within(endless_passes=True):
        examples = make_examples()
    return examples.repeat().shuffle(5, seed=3).batch(4).prefetch(8)


def in_memory(tmp_path):
    texts = [f"text {number}" for number in range(COUNT)]
    source = InMemorySource("texts", lambda split: {"text": texts}, {"train": COUNT}, "48 texts")
    return lambda: source.get_dataset("train", seed=5).map(lambda example: example["text"])


def text_files(tmp_path):
    (tmp_path / "texts.txt").write_text("".join(f"text {number}\n" for number in range(COUNT)))
    source = TextFilesSource({"text": "text"}, str(tmp_path / "texts.txt"), str(tmp_path / "texts.txt"))
    return lambda: source.get_dataset("train", seed=5).map(lambda example: example["text"])


def cached(tmp_path):
    from tests.data import cached_tasks_test

    (tmp_path / "texts.txt").write_text("".join(f"text {number}\n" for number in range(COUNT)))
    cached_tasks_test.add_task("cached_passes", {"train": str(tmp_path / "texts.txt")})
    cached_tasks_test.make("cached_passes", "train", tmp_path / "cache")
    task = seqio.TaskRegistry.get("cached_passes")
    manifest = cache_files.load(task, "train", str(tmp_path / "cache"))
    folder = cache_files.folder_of(str(tmp_path / "cache"), "cached_passes", "train")
    source = cached_tasks.CachedSource("train", manifest, folder, 5, CorruptRecords())
    return lambda: source.get_dataset("train").map(lambda example: next(iter(example.values()))[:4])


def files_of_seqio(tmp_path):
    for index in range(6):
        (tmp_path / f"texts-{index}.txt").write_text("".join(f"{index} {number}\n" for number in range(COUNT // 6)))
    task = seqio.Task("files_of_seqio", seqio.TextLineDataSource({"train": str(tmp_path / "texts-*.txt")}), {}, [])
    source = count_passes(task, 5).source
    return lambda: source.get_dataset("train", seed=5)


def own(tmp_path):
    return lambda: data.passes(shuffled, seed=5)


# Three batches, with those read ahead, end a pass: there TensorFlow's own repetition forgets which one it is in.
@pytest.mark.parametrize("counts", [(3, 9, 15), pytest.param(range(30), marks=pytest.mark.exhaustive)],
                         ids=["few", "all"])
@pytest.mark.parametrize("make", [own, in_memory, text_files, cached, files_of_seqio])
def test_positions_are_gone_on_from_exactly(make, counts, tmp_path, monkeypatch):
    monkeypatch.setattr(example_files, "PIECE", 30)
    make_examples = make(tmp_path)
    straight = take(iter(read_to_train(make_examples)), 60)
    for count in counts:
        iterator = iter(read_to_train(make_examples))
        assert take(iterator, count) == straight[:count]
        time.sleep(0.01)  # prefetching has reached its limit
        tf.train.Checkpoint(iterator=iterator).write(str(tmp_path / "position"))
        again = iter(read_to_train(make_examples))
        tf.train.Checkpoint(iterator=again).read(str(tmp_path / "position")).assert_existing_objects_matched()
        assert take(again, 30) == straight[count:count + 30], count


def test_every_pass_has_every_example_once_in_another_order():
    with context.within(endless_passes=True):
        (first, second, third) = take(iter(data.passes(shuffled, seed=5).batch(COUNT)), 3)
        (other,) = take(iter(data.passes(shuffled, seed=6).batch(COUNT)), 1)
    assert sorted(first) == sorted(second) == sorted(third) == sorted(other) == list(range(COUNT))
    assert len({tuple(order) for order in (first, second, third, other)}) == 4


def test_who_does_not_read_to_train_gets_one_pass_and_another_one_in_each_repetition():
    found = [int(number) for number in data.passes(shuffled, seed=5).repeat(2)]
    assert sorted(found[:COUNT]) == sorted(found[COUNT:]) == list(range(COUNT))
    assert found[:COUNT] != found[COUNT:]
