"""Rows of batches from the cache depend on the seed alone: not on who reads them, nor on where reading stopped."""

import itertools
import os
import threading

import numpy as np
import pytest
import seqio
import tensorflow as tf

from switch_tf import data
from switch_tf.tasks.in_memory import InMemorySource
from switch_tf.tasks.text_source import TextFilesSource

LENGTHS = {"inputs": 3, "targets": 2}
COUNTS = {"many": 90, "few": 3}
VOCABULARY = seqio.PassThroughVocabulary(1000, eos_id=1)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """The cache of "many", 90 numbers, of "few", 3 numbers, and of "both", a mixture of them."""
    folder = tmp_path_factory.mktemp("cache")
    for name, count in COUNTS.items():
        def read(split, shuffle_files, seed=None, count=count):
            numbers = tf.data.Dataset.range(2, 2 + count)
            return numbers.map(lambda n: {"inputs": tf.cast([n, n], tf.int32), "targets": tf.cast([n], tf.int32)})

        seqio.TaskRegistry.add(
            name, source=seqio.FunctionDataSource(read, ["train"]), preprocessors=[seqio.CacheDatasetPlaceholder()],
            output_features={key: seqio.Feature(VOCABULARY, add_eos=False) for key in LENGTHS},
            shuffle_buffer_size=16)
        (*shards,) = data.plan_cache(name, "train", None, str(folder), 3, False)
        for shard in shards:
            data.write_shard(shard)
        data.finish_cache(shards)
    seqio.MixtureRegistry.add("both", [("many", 3), ("few", 1)])
    yield str(folder)
    seqio.MixtureRegistry.remove("both")
    for name in COUNTS:
        seqio.TaskRegistry.remove(name)


def describe(cache, name="many", batch_size=16, seed=0, parts=4):
    """Describes batches from the cache, or from the source if it is None."""
    return data.DatasetDescription(name, LENGTHS, batch_size, seed=seed, use_cached_tasks=cache is not None,
                                   cache_dir=cache, cache_parts=parts)


def take(batches, count):
    return [{name: value.numpy() for name, value in next(batches).items()} for _ in range(count)]


def same(some, others, rows=slice(None)):
    return all(np.array_equal(one[name][..., rows, :], other[name][..., rows, :])
               for one, other in zip(some, others, strict=True) for name in one)


@pytest.mark.parametrize("name, is_cached", [
    pytest.param("many", True, marks=pytest.mark.slow), ("few", True), ("many", False),
    pytest.param("both", True, marks=pytest.mark.slow)])
def test_processes_read_their_own_rows_of_the_batches_of_one(cache, name, is_cached):
    description = describe(cache if is_cached else None, name)
    whole = take(data.get_batches(description, 2), 4)
    assert same(whole, list(data.get_dataset(description).batch(2).take(4).as_numpy_iterator()))
    for ranges, parts in (([(5, 6)], (1,)), ([(0, 2), (2, 4), (8, 16)], (0, 2, 3))):
        own = take(data.get_batches(description, 2, ranges), 4)
        of_others = [row for row in range(16) if row // 4 not in parts]
        assert all(same(own, whole, slice(*rows)) for rows in ranges)
        assert not any(value[:, of_others].any() for value in own[0].values())


def test_a_process_builds_only_the_parts_that_it_has_rows_in(cache, monkeypatch):
    monkeypatch.setattr("switch_tf.data.batches.get_part", lambda description, index, corrupt: tf.data.Dataset.range(1))
    assert list(data.get_batches(describe(cache), 1, [(5, 9)])._parts) == [1, 2]
    assert list(data.get_batches(describe(cache), 1, [(13, 14), (0, 2)])._parts) == [0, 3]
    assert list(data.get_batches(describe(cache), 1)._parts) == list(range(4))
    assert list(data.get_batches(describe(cache, parts=1), 1, [(4, 9)])._parts) == [0]
    with pytest.raises(ValueError, match="CACHE_PARTS must divide BATCH_SIZE .16., not 5"):
        describe(cache, parts=5)


@pytest.mark.slow
@pytest.mark.parametrize("saved_by, restored_by, name", [(4, 2, "both"), (1, 4, "many"), (4, 1, "both")])
def test_positions_are_restored_by_any_number_of_processes(cache, tmp_path, saved_by, restored_by, name):
    description = describe(cache if name == "both" else None, name)

    def processes(count):
        return [data.get_batches(description, 1, [(index * 16 // count, (index + 1) * 16 // count)])
                for index in range(count)]

    expected = take(data.get_batches(description), 12)[7:]
    for index, batches in enumerate(processes(saved_by)):
        take(batches, 7)
        batches.save(tmp_path, index)
    for index, batches in enumerate(processes(restored_by)):
        batches.restore(tmp_path)
        rows = slice(index * 16 // restored_by, (index + 1) * 16 // restored_by)
        assert same(take(batches, 5), expected, rows)


@pytest.mark.slow
def test_parts_are_of_one_epoch_and_neither_their_examples_nor_their_noise_are_the_same(cache):
    (batch,) = take(data.get_batches(describe(cache, batch_size=80)), 1)
    numbers = batch["decoder_target_tokens"][0, :, 0]
    assert len(set(numbers)) == 80  # of 90: every part has its own
    orders = [tuple(take(data.get_batches(describe(cache, seed=seed)), 1)[0]["decoder_target_tokens"].ravel())
              for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]


def numbers_in_files(folder, form, count):
    """A source of 0 to 47 in text files, "own" or seqio's."""
    for index in range(count):
        (folder / f"{index}.txt").write_text("".join(f"{number}\n" for number in range(index, 48, count)))
    if form == "seqio":
        return seqio.TextLineDataSource({"train": str(folder / "*.txt")})
    return TextFilesSource({"text": "text"}, str(folder / "*.txt"), str(folder / "*.txt"))


@pytest.mark.parametrize("make", [
    lambda folder: InMemorySource("texts", lambda split: {"text": [str(number) for number in range(48)]},
                                  {"train": 48}, ""),
    lambda folder: numbers_in_files(folder, "own", 1), lambda folder: numbers_in_files(folder, "own", 8),
    lambda folder: numbers_in_files(folder, "seqio", 2), lambda folder: numbers_in_files(folder, "seqio", 8)])
def test_parts_of_a_text_have_examples_of_their_own(make, tmp_path):
    def parsed(texts):
        return texts.map(lambda text: {name: tf.strings.to_number(text["text"] if isinstance(text, dict) else text,
                                                                  tf.int32)[None] + 1 for name in LENGTHS})

    seqio.TaskRegistry.remove("own_examples")
    seqio.TaskRegistry.add("own_examples", source=make(tmp_path), preprocessors=[parsed], shuffle_buffer_size=1,
                           output_features={key: seqio.Feature(VOCABULARY, add_eos=False) for key in LENGTHS})
    batches = data.get_batches(describe(None, "own_examples", batch_size=8))
    numbers = np.concatenate([batch["decoder_target_tokens"][0, :, 0] for batch in take(batches, 6)])
    assert sorted(numbers) == list(range(1, 49))  # an epoch


def test_a_part_of_a_text_without_examples_is_refused_where_it_would_be_read_forever():
    data.check_examples(describe(None, "both", parts=2))
    with pytest.raises(ValueError, match="part 3 of 4 of 'few' has none.*use fewer parts"):
        data.check_examples(describe(None, "both"))


def test_a_position_that_is_missing_is_an_error(cache, tmp_path):
    batches = data.get_batches(describe(cache, parts=2))
    batches.save(tmp_path, 0)
    for file in itertools.chain(tmp_path.glob("data_position_00001*")):
        file.unlink()
    with pytest.raises(tf.errors.NotFoundError, match="data_position_00001"):
        batches.restore(tmp_path)


def test_batches_that_are_read_ahead_count_when_they_are_taken(cache, tmp_path):
    description = describe(cache, parts=2)
    expected = take(data.get_batches(description), 3)
    batches = data.get_batches(description)
    for number in range(2):
        batches.read_ahead()
        batches.read_ahead()  # the same
        batches.save(make_folder(tmp_path / str(number)), 0)
        assert same([batches.wait(lambda: False)], expected[number:number + 1])
    for number in range(2):
        batches = data.get_batches(description)
        batches.restore(tmp_path / str(number))
        assert same(take(batches, 1), expected[number:number + 1])


def test_of_uncached_text_the_first_process_alone_writes_the_position(tmp_path):
    def make():
        return data.Batches({None: iter(tf.data.Dataset.range(9).map(lambda number: {"n": number[None, None]}))}, 1)

    processes = [make(), make()]
    for index, batches in enumerate(processes):
        for _ in range(3):
            next(batches)
        batches.save(tmp_path, index)
        batches.read_ahead()  # which the next position does not count
        batches.save(make_folder(tmp_path / str(index)), index)
    assert {file.name for file in tmp_path.glob("*.*")} == {"data_position.index", "data_position.data-00000-of-00001"}
    assert not list((tmp_path / "1").iterdir())
    for folder in (tmp_path, tmp_path / "0"):
        again = make()
        again.restore(folder)
        assert next(again)["n"].numpy() == [[3]]


def test_an_input_that_waits_while_it_is_read_ahead_is_closed_soon(make_numbers, tmp_path, monkeypatch):
    monkeypatch.setattr("switch_tf.data.batches._CLOSING_SECONDS", 0.3)
    batches = make_numbers()
    for _ in range(9):
        next(batches)
    batches.read_ahead()
    batches.save(make_folder(tmp_path / "last"), 0)
    batches.close()
    assert batches.is_stuck
    again = make_numbers()
    again.restore(tmp_path / "last")
    assert not again.is_stuck
    _replace(tmp_path / "pipe")


@pytest.mark.parametrize("error", [ZeroDivisionError, TimeoutError, StopIteration])
def test_the_error_of_an_input_is_passed_on(error):
    def fail():
        raise error

    for read in (next, lambda batches: batches.wait(lambda: False)):
        with pytest.raises(error):
            read(data.Batches({None: iter(fail, None)}, batch_size=1))


def test_an_input_that_never_comes_is_given_up_when_that_is_wanted():
    go, asked = threading.Event(), []
    batches = data.Batches({None: iter(go.wait, None)}, batch_size=1)
    assert batches.wait(lambda: asked.append(0) or len(asked) == 3) is None and batches.is_stuck
    assert len(asked) == 3
    go.set()


def make_folder(path):
    path.mkdir()
    return path


@pytest.fixture
def make_numbers(tmp_path):
    """A function that makes Batches of 0 to 8 and then of what is in a pipe, or later in a file of its name."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    def make():
        behind = tf.data.TextLineDataset(str(pipe)).map(lambda text: tf.strings.to_number(text, tf.int64))
        numbers = tf.data.Dataset.range(9).concatenate(behind).batch(1).prefetch(1)
        return data.Batches({None: iter(numbers)}, batch_size=1)

    yield make
    _replace(pipe)


def _replace(pipe, text=""):
    """Makes a pipe a file. Threads that wait for it read nothing more, and later ones read the file."""
    writer = os.open(pipe, os.O_RDWR)
    pipe.unlink()
    pipe.write_text(text)
    os.close(writer)


@pytest.mark.parametrize("saved_at", [None, 5])
@pytest.mark.parametrize("is_awaited", [True, False])
def test_of_an_input_that_waits_the_place_is_saved_and_found_again(make_numbers, tmp_path, monkeypatch, saved_at,
                                                                  is_awaited):
    monkeypatch.setattr("switch_tf.data.batches._SAVING_SECONDS", 0.5)
    batches = make_numbers()
    for number in range(9):
        if number == saved_at:
            (tmp_path / "first").mkdir()
            batches.save(tmp_path / "first", 0)
        assert int(next(batches)[0]) == number
    if is_awaited:
        assert batches.wait(lambda: True) is None and batches.is_stuck
    (tmp_path / "last").mkdir()
    batches.save(tmp_path / "last", 0)  # what is read ahead waits, too
    assert batches.is_stuck and batches.wait(lambda: False) is None
    _replace(tmp_path / "pipe", "9\n10\n")
    again = make_numbers()
    again.restore(tmp_path / "last")
    assert int(next(again)[0]) == 9
    (tmp_path / "then").mkdir()
    again.save(tmp_path / "then", 0)
    assert not list((tmp_path / "then").glob("*.later.json"))
    third = make_numbers()
    third.restore(tmp_path / "then")
    assert int(next(third)[0]) == 10
