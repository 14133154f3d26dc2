"""Corrupt records of a cache are left out by name, up to a limit, exactly: across kills and numbers of hosts."""

import functools
import hashlib
import json
import re

import numpy as np
import pytest
import seqio
import tensorflow as tf

from switch_tf import data
from switch_tf.configs.run import Run
from switch_tf.data import cached_tasks, pipeline
from switch_tf.data.cache_files import CorruptRecords
from switch_tf.data.example_files import UnreachableData
from switch_tf.refusals import Refusal, sentence_about_data
from switch_tf.tasks import preprocessors, vocabularies

NUM_TEXTS, LENGTHS, STEPS, PARTS = 60, {"inputs": 48, "targets": 24}, 40, 2
CORRUPTED = (3, 17, 40)  # numbers of texts
CORRUPT = RuntimeError("Corrupted Riegeli/records file: chunk data hash mismatch, chunk at 1; at byte 2")


def as_inputs(dataset):
    return dataset.map(lambda example: {"inputs": example["targets"], "targets": example["targets"]})


TASKS = {
    # Each row of a batch is made of many records, with noise.
    "corrupted_spans": preprocessors.pretraining(preprocessors.span_corruption),
    # Each row is a record.
    "corrupted": [*preprocessors.pretraining(preprocessors.span_corruption)[:4], as_inputs]}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """The caches of `TASKS`, each of two shards with three corrupt records."""
    folder = tmp_path_factory.mktemp("corrupted")
    (folder / "texts.txt").write_text("".join(f"text number {number} of all\n" for number in range(NUM_TEXTS)))
    for name, steps in TASKS.items():
        seqio.TaskRegistry.add(
            name, source=seqio.FileDataSource(
                lambda file: tf.data.TextLineDataset(file).map(lambda line: {"text": line}),
                {"train": str(folder / "texts.txt")}),
            preprocessors=steps, output_features=preprocessors.output_features(vocabularies.byte()), metric_fns=[],
            shuffle_buffer_size=8)
        shards = data.plan_cache(name, "train", None, str(folder), num_shards=2, overwrite=False)
        for shard in shards:
            data.write_shard(shard)
        data.finish_cache(shards)
        for number in CORRUPTED:
            # Bytes of the text as ids of the task's vocabulary, which array_record stores as they are.
            text = bytes(ord(letter) + 3 for letter in f"number {number} of")
            (file,) = (shard.file for shard in shards if text in shard.file.read_bytes())
            file.write_bytes(file.read_bytes().replace(text, b"?" + text[1:]))
    yield folder
    for name in TASKS:
        seqio.TaskRegistry.remove(name)


@pytest.fixture(autouse=True, scope="module")
def _few_records_at_a_time():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cached_tasks, "_RECORDS_AT_A_TIME", 4)
        yield


@pytest.fixture(scope="module")
def straight(cache):
    """A function of a task's name to the batches that a process reads which nobody stops."""
    return functools.cache(lambda name="corrupted": take(batches(cache, name=name), STEPS))


def batches(cache, limit=3, rows=None, name="corrupted"):
    description = data.DatasetDescription(name, LENGTHS, 4, use_cached_tasks=True, cache_dir=str(cache),
                                          cache_parts=PARTS, skip_corrupt_records=limit)
    return data.get_batches(description, rows=rows)


def digest(some, rows=slice(None)):
    """A hash of the rows of batches."""
    digests = hashlib.sha256()
    for batch in some:
        for name in sorted(batch):
            digests.update(np.ascontiguousarray(batch[name].numpy()[:, rows]).tobytes())
    return digests.hexdigest()


def take(iterator, count):
    return [next(iterator) for _ in range(count)]


def left_out(error_output):
    return re.findall(r"Left out: .*-of-00002.array_record, record \d+ \(Corrupted Riegeli", error_output)


def test_every_pass_leaves_out_the_same_records_and_has_every_other_one(cache, capsys):
    description = data.DatasetDescription("corrupted", LENGTHS, 4, use_cached_tasks=True, cache_dir=str(cache),
                                          skip_corrupt_records=3)
    provider = pipeline.provider_of(description)
    found = provider.source.get_dataset("train", seed=1).repeat(2)
    texts = [bytes(np.asarray(example["targets"] - 3).astype(np.uint8)).decode()
             for example in found.as_numpy_iterator()]
    expected = sorted(f"text number {number} of all" for number in range(NUM_TEXTS) if number not in CORRUPTED)
    half = len(expected)
    assert sorted(texts[:half]) == sorted(texts[half:]) == expected and texts[:half] != texts[half:]
    assert len(left_out(capsys.readouterr().err)) == 3  # each named once
    data.check_examples(description)


@pytest.mark.parametrize("name", [pytest.param("corrupted_spans", marks=pytest.mark.slow), "corrupted"])
def test_examples_are_the_same_across_kills_and_numbers_of_hosts(cache, straight, tmp_path, name):
    expected = straight(name)
    resumed = []
    for number in range(3):  # each a process that is killed later, with batches read ahead
        iterator = batches(cache, name=name)
        if number:
            iterator.restore(tmp_path / str(number - 1))
        resumed += take(iterator, (10, 10, STEPS - 20)[number])
        (tmp_path / str(number)).mkdir()
        iterator.save(tmp_path / str(number), 0)
    assert digest(resumed) == digest(expected)
    first, second = slice(0, 2), slice(2, 4)  # of two hosts
    assert digest(take(batches(cache, 3, [(0, 2)], name), STEPS), first) == digest(expected, first)
    other = batches(cache, 3, [(2, 4)], name)
    other.restore(tmp_path / "1")  # saved by one host
    assert digest(take(other, STEPS - 20), second) == digest(expected[20:], second)


def steps_before_the_end(iterator):
    """Counts batches until one cannot be read, and returns the sentence."""
    for count in range(STEPS):
        try:
            next(iterator)
        except tf.errors.OpError as error:
            return count, sentence_about_data(error)
    return STEPS, None


@pytest.mark.parametrize("limit", [pytest.param(0, marks=pytest.mark.slow), 1])
@pytest.mark.parametrize("num_kills", [3, pytest.param(STEPS, marks=pytest.mark.exhaustive)])
def test_one_more_than_the_limit_ends_the_reading_at_the_same_step_whether_it_was_killed_or_not(cache, tmp_path, limit,
                                                                                                num_kills):
    count, sentence = steps_before_the_end(batches(cache, limit))
    assert 1 < count < STEPS and ".array_record is damaged, record " in sentence
    assert ("one more than the 1 of Run.skip_corrupt_records" in sentence) == (limit == 1)
    iterator, stopped = batches(cache, limit), 0
    for kill_after in sorted({*np.linspace(1, count - 1, num_kills, dtype=int).tolist()}):
        take(iterator, kill_after - stopped)
        stopped = kill_after
        folder = tmp_path / str(stopped)
        folder.mkdir()
        iterator.save(folder, 0)
        again = batches(cache, limit)
        again.restore(folder)
        assert steps_before_the_end(again) == (count - stopped, sentence)


@pytest.mark.parametrize("hosts", [
    pytest.param([(0, 4)], id="one host", marks=pytest.mark.slow), pytest.param([(0, 2), (2, 4)], id="two hosts")])
def test_a_run_that_ended_at_a_corrupt_record_goes_on_without_it(cache, straight, tmp_path, hosts):
    count = min(steps_before_the_end(batches(cache, 0, [rows]))[0] for rows in hosts)
    iterators = [batches(cache, 0, [rows]) for rows in hosts]
    for iterator in iterators:
        take(iterator, count - 2)
    for taken in (count - 2, count - 1):  # the positions may hold the error
        folder = tmp_path / str(taken)
        folder.mkdir()
        for index, iterator in enumerate(iterators):
            iterator.save(folder, index)
        again = batches(cache)
        again.restore(folder)
        assert digest(take(again, STEPS - taken)) == digest(straight()[taken:])
        for iterator in iterators:
            take(iterator, 1)


def test_a_file_of_another_process_that_is_damaged_is_a_damaged_position(cache, tmp_path):
    iterator = batches(cache)
    take(iterator, STEPS)
    iterator.save(tmp_path, 0)
    (saved, *_) = tmp_path.glob("*.corrupt_records")
    saved.write_text("[")
    with pytest.raises(AssertionError, match="is damaged"):
        batches(cache).restore(tmp_path)


@pytest.mark.parametrize("limit", [0, 1])
def test_a_disk_that_fails_is_no_corrupt_record(limit):
    with pytest.raises(UnreachableData, match="record 4, cannot be read .Input/output error"):
        CorruptRecords(limit).add("cache/task/train/0.array_record", 4, RuntimeError("Input/output error reading"))


def test_the_limit_holds_for_each_task_and_counts_a_record_once():
    corrupt = CorruptRecords(1)
    for task in ("one", "two"):
        for _ in range(2):
            corrupt.add(f"cache/{task}/train/0.array_record", 4, CORRUPT)
    moved = CorruptRecords(1)
    moved.take_up(json.loads(corrupt.text()))
    moved.add("moved/cache/one/train/0.array_record", 4, CORRUPT)
    with pytest.raises(data.BadData, match="record 5, one more than the 1 of Run.skip_corrupt_records .Corrupted"):
        moved.add("moved/cache/one/train/0.array_record", 5, CORRUPT)


def test_text_has_no_records_to_leave_out():
    with pytest.raises(Refusal, match="Run.skip_corrupt_records .2. leaves out records of a cache, which is read by"):
        Run("run", "docs_corpus", LENGTHS, 1, 4, skip_corrupt_records=2)
