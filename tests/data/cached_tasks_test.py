"""A cache holds the task's own examples, read by index: shuffled, sharded and resumed; a stale one is refused."""

import collections
import dataclasses
import functools
import itertools
import json
import pathlib

import numpy as np
import pytest
import seqio
import tensorflow as tf

from switch_tf import data
from switch_tf.data import cache_files, cached_tasks, pipeline
from switch_tf.data.vocabularies import tasks_of
from switch_tf.tasks import preprocessors, vocabularies

NUM_TEXTS = 150
LENGTHS = {"inputs": 48, "targets": 24}


def add_task(name, files, text="text", **replaced):
    def read(file):
        return tf.data.TextLineDataset(file).map(lambda line: {text: line})

    arguments = {
        "source": files if isinstance(files, seqio.DataSource) else seqio.FileDataSource(read, files),
        "preprocessors": preprocessors.pretraining(preprocessors.span_corruption),
        "output_features": preprocessors.output_features(vocabularies.byte()),
        "metric_fns": [],
    } | replaced
    seqio.TaskRegistry.remove(name)
    return seqio.TaskRegistry.add(name, **arguments)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Two files to train on and one that is held out, every line another text."""
    folder = tmp_path_factory.mktemp("texts")
    lines = [f"text {number} " + "word " * (number % 7) for number in range(NUM_TEXTS)]
    for name, some in (("train-0", lines[:60]), ("train-1", lines[60:]), ("validation", lines[:40])):
        (folder / f"{name}.txt").write_text("\n".join(some) + "\n")
    return folder


@pytest.fixture(scope="module")
def cache(texts, tmp_path_factory):
    """The cache of "cached" in three shards and of the mixture "cached_mixture" beside it."""
    files = {"train": str(texts / "train-*.txt"), "validation": str(texts / "validation.txt")}
    add_task("cached", files)
    add_task("cached_too", {"train": str(texts / "validation.txt")})
    seqio.MixtureRegistry.add("cached_mixture", [("cached", 3), ("cached_too", 1)])
    folder = tmp_path_factory.mktemp("cache")
    for split in ("train", "validation"):
        make("cached_mixture", split, folder)
    yield folder
    seqio.MixtureRegistry.remove("cached_mixture")
    for name in ("cached", "cached_too"):
        seqio.TaskRegistry.remove(name)


def make(name, split, folder, **options):
    shards = data.plan_cache(name, split, None, str(folder), **{"num_shards": None, "overwrite": False} | options)
    for shard in shards:
        data.write_shard(shard)
    for _, some in itertools.groupby(shards, lambda shard: shard.folder):
        data.finish_cache(list(some))
    return shards


def describe(name, split, cache_dir=None, seed=0, batch_size=4):
    return data.DatasetDescription(name, LENGTHS, batch_size, split, seed, use_cached_tasks=cache_dir is not None,
                                   cache_dir=cache_dir and str(cache_dir))


def texts_of(dataset):
    """The texts of examples before the placeholder, in order."""
    return [bytes(np.asarray(example["targets"] - 3).astype(np.uint8)).decode()
            for example in dataset.as_numpy_iterator()]


def source(cache, seed=0, split="train"):
    return pipeline.provider_of(describe("cached", split, cache, seed)).source


def same(one, other):
    return all(np.array_equal(one[name], other[name]) for name in one | other)


def test_a_held_out_split_is_the_same_batch_by_batch_as_without_the_cache(cache):
    plain, cached = (list(data.get_dataset(describe("cached_mixture", "validation", folder)).as_numpy_iterator())
                     for folder in (None, cache))
    assert len(plain) == len(cached) > 2
    assert all(map(same, plain, cached))


def test_an_epoch_has_every_example_once_in_an_order_of_its_seed_and_number(cache, texts):
    written = [line for file in sorted(texts.glob("train-*.txt")) for line in file.read_text().splitlines()]
    epochs = {}
    for seed in (0, 1):
        found = texts_of(source(cache, seed).get_dataset("train", shuffle=True, seed=seed + 5).repeat(2))
        epochs[seed] = found[:NUM_TEXTS], found[NUM_TEXTS:]
        for epoch in epochs[seed]:
            assert collections.Counter(epoch) == collections.Counter(written)
    orders = [*epochs[0], *epochs[1], written]
    assert all(one != other for one, other in itertools.combinations(orders, 2))
    assert epochs[0][0] == texts_of(source(cache, 0).get_dataset("train", shuffle=True, seed=99).take(NUM_TEXTS))


@pytest.mark.parametrize("num_parts", [2, 7])
def test_parts_share_an_epoch_and_each_has_an_order_of_its_own(cache, num_parts):
    whole, orders = texts_of(source(cache).get_dataset("train", shuffle=False)), []
    for index in range(num_parts):
        part = seqio.ShardInfo(index, num_parts)
        first, end = source(cache).range_of(part)
        read = texts_of(source(cache).get_dataset("train", shuffle=True, shard_info=part))
        assert sorted(read) == sorted(whole[first:end])
        orders.append([whole.index(text) - first for text in read])
    assert sorted(itertools.chain(*orders)) == sorted(itertools.chain(*map(range, map(len, orders))))
    assert sum(map(len, orders)) == len(whole) and len({tuple(order[:9]) for order in orders}) == num_parts


@pytest.mark.parametrize("shards, ranges", [
    ([100, 101, 99, 100], [(0, 201), (201, 400)]),  # whole shards
    ([50, 51, 49, 50] * 2, [(0, 101), (101, 200), (200, 301), (301, 400)]),
    ([10, 290, 60, 40], [(0, 133), (133, 267), (267, 400)]),  # equal shares, because shards differ too much
    ([400], [(0, 133), (133, 267), (267, 400)]),
    ([1, 1], [(0, 2)] * 3)])  # too few to share
def test_a_part_owns_whole_shards_where_they_make_an_equal_share(tmp_path, shards, ranges):
    manifest = {"examples": sum(shards), "shards": [{"examples": count} for count in shards]}
    owner = cached_tasks.CachedSource("train", manifest, tmp_path, 0, cache_files.CorruptRecords())
    assert [owner.range_of(seqio.ShardInfo(index, len(ranges))) for index in range(len(ranges))] == ranges


def test_a_process_opens_the_shards_of_its_own_parts(cache, texts, monkeypatch):
    add_task("in_shards", {"train": str(texts / "train-*.txt")})
    make("in_shards", "train", cache, num_shards=6)
    description = dataclasses.replace(describe("in_shards", "train", cache, batch_size=6), cache_parts=3)
    opened, open_shard = collections.defaultdict(set), cached_tasks.open_shard
    for rows in ((0, 2), (2, 6)):
        monkeypatch.setattr(cached_tasks, "open_shard", lambda file, sha256, rows=rows: (
            opened[rows].add(pathlib.Path(file).name[:5]), open_shard(file, sha256))[1])
        batches = data.get_batches(description, 1, [rows])
        for _ in range(30):
            next(batches)
        batches.close()
    assert opened == {(0, 2): {"00000", "00001"}, (2, 6): {"00002", "00003", "00004", "00005"}}


def test_noise_is_drawn_anew_in_every_epoch(cache, texts):
    add_task("cached_once", {"train": str(texts / "validation.txt")})
    make("cached_once", "train", cache)
    provider = pipeline.provider_of(describe("cached_once", "train", cache))
    found = provider.get_dataset(LENGTHS, "train", shuffle=False, seed=0, num_epochs=2, try_in_mem_cache=False)
    pairs = [(example["inputs"].tolist(), example["targets"].tolist()) for example in found.as_numpy_iterator()]
    half = len(pairs) // 2
    assert half > 5 and sum(one == other for one, other in zip(pairs[:half], pairs[half:], strict=False)) < half / 4


@pytest.mark.slow
def test_training_batches_go_on_bit_for_bit_where_they_stopped(cache, tmp_path):
    dataset = data.get_dataset(describe("cached_mixture", "train", cache))
    iterator = iter(dataset)
    for _ in range(9):
        next(iterator)
    saved = tf.train.Checkpoint(iterator=iterator).write(str(tmp_path / "position"))
    expected = [{name: value.numpy() for name, value in next(iterator).items()} for _ in range(40)]
    again = iter(data.get_dataset(describe("cached_mixture", "train", cache)))
    tf.train.Checkpoint(iterator=again).read(saved).assert_existing_objects_matched()
    assert all(same(batch, {name: value.numpy() for name, value in next(again).items()}) for batch in expected)


def test_few_source_files_are_cut_into_more_shards_and_a_held_out_split_keeps_its_order(cache):
    assert len(list((cache / "cached" / "train").glob("*.array_record"))) == 8
    assert len(list((cache / "cached" / "validation").glob("*.array_record"))) == 1
    manifest = json.loads((cache / "cached" / "train" / "manifest.json").read_text())
    assert manifest["examples"] == NUM_TEXTS
    assert manifest["tokens"]["targets"] == sum(shard["tokens"]["targets"] for shard in manifest["shards"])
    assert sum(map(len, texts_of(source(cache).get_dataset("train", shuffle=False)))) == manifest["tokens"]["targets"]


def test_the_tokens_are_counted_although_the_first_shard_is_empty(tmp_path):
    (tmp_path / "0.txt").write_text("")
    (tmp_path / "1.txt").write_text("abc\n")
    add_task("half_empty", {"train": str(tmp_path / "*.txt")})
    shards = make("half_empty", "train", tmp_path / "cache", num_shards=2)
    (summary,) = data.finish_cache(shards)
    assert summary["examples"] == 1 and summary["tokens"]["targets"] == 3
    assert [json.loads(shard.description.read_text())["examples"] for shard in shards] == [0, 1]


def test_every_type_that_an_example_holds_comes_back(tmp_path):
    examples = {"targets": tf.ragged.constant([[5, 6, 7], [8], []], dtype=tf.int32), "name": ["a", "", "\N{SNOWMAN}"],
                "weights": tf.constant([[0.5, 1e-8], [2.0, 3.0], [4.0, 5.0]]), "flag": [True, False, True],
                "answers": tf.ragged.constant([["x", "y"], [], ["z"]]), "number": tf.constant([2**40, -1, 0], tf.int64)}

    def read(split, shuffle_files, seed=None):
        dataset = tf.data.Dataset.from_tensor_slices(examples)
        return dataset.map(lambda row: {name: value.to_tensor() if isinstance(value, tf.RaggedTensor) else value
                                        for name, value in row.items()})

    feature = seqio.Feature(seqio.PassThroughVocabulary(50), add_eos=False)
    add_task("typed", seqio.FunctionDataSource(read, ["train"]), output_features={"targets": feature},
             preprocessors=[seqio.CacheDatasetPlaceholder()])
    make("typed", "train", tmp_path, num_shards=2)
    found = pipeline.provider_of(describe("typed", "train", tmp_path)).source.get_dataset(
        "train", shuffle=False)
    plain = list(seqio.TaskRegistry.get("typed").source.get_dataset("train", shuffle=False).as_numpy_iterator())
    for expected, example in zip([plain[0], plain[2], plain[1]], found.as_numpy_iterator(), strict=True):
        for name, value in expected.items():
            assert np.asarray(example[name]).dtype == np.asarray(value).dtype
            np.testing.assert_array_equal(example[name], value)


def test_a_shard_that_cannot_be_read_leaves_nothing_and_is_told(texts, tmp_path):
    broken = tmp_path / "broken.txt"
    broken.write_text("a text")
    add_task("broken", {"train": str(broken)}, text="body")
    (shard, *_) = data.plan_cache("broken", "train", None, str(tmp_path), 1, False)
    with pytest.raises(ValueError, match=r"Task 'broken', split 'train'.*text"):
        data.write_shard(shard)
    assert [path.name for path in pathlib.Path(shard.folder).iterdir()] == ["request.json"]


def test_damaged_and_missing_shards_are_found_and_written_again(cache, texts, tmp_path):
    add_task("damaged", {"train": str(texts / "train-*.txt")})
    shards = make("damaged", "train", tmp_path)
    damaged, missing = shards[1], shards[2]
    content = damaged.file.read_bytes()
    damaged.file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    for described in ("", "[]", "{}"):
        missing.description.write_text(described)
        assert not data.is_complete(missing)
    missing.description.unlink()
    assert [data.is_complete(shard) for shard in shards] == [True, False, False] + [True] * 5
    with pytest.raises(ValueError, match="make it good by `switch-tf cache damaged`"):
        damaged.file.write_bytes(content[:-1])
        data.get_dataset(describe("damaged", "train", tmp_path))
    damaged.file.unlink()
    for target in ("nothing", damaged.file.name):  # a link to itself
        damaged.file.symlink_to(target)
        assert not data.is_complete(damaged)
        with pytest.raises(ValueError, match="00001-of-00008.array_record is missing; make it good by"):
            data.get_dataset(describe("damaged", "train", tmp_path))
        data.write_shard(damaged)
        assert damaged.file.read_bytes() == content
        damaged.file.unlink()
    middle = len(content) // 3
    damaged.file.write_bytes(content[:middle] + bytes(middle) + content[2 * middle:])
    with pytest.raises(tf.errors.OpError, match="BadData: .*00001-of-00008.array_record is damaged"):
        list(pipeline.provider_of(describe("damaged", "train", tmp_path)).source.get_dataset("train"))
    data.write_shard(damaged)
    assert damaged.file.read_bytes() == content


def test_what_is_no_cache_of_this_task_is_refused(cache, texts, tmp_path):
    def refused(pattern, **replaced):
        with pytest.raises(ValueError, match=pattern):
            data.get_dataset(dataclasses.replace(describe("changing", "train", tmp_path), **replaced))

    copy = tmp_path / "copy.txt"
    copy.write_text((texts / "validation.txt").read_text())
    files = {"train": str(copy)}
    add_task("changing", files)
    refused("'changing', split 'train', does not exist in .* make it by `switch-tf cache changing`")
    data.plan_cache("changing", "train", None, str(tmp_path), 1, False)
    refused("is unfinished")
    make("changing", "train", tmp_path, num_shards=1)
    data.get_dataset(describe("changing", "train", tmp_path))
    refused(r"stale: its vocabularies, inputs, was 'ByteVocabulary of 359 ids' and is 'SentencePieceVocabulary of 4096",
            vocabulary="docs_corpus")
    copy.write_text(copy.read_text() + "one more\n")
    refused("stale: its source, changing: copy.txt, was .* Make it anew by")
    with pytest.raises(ValueError, match="is of something else: its source.*Give --overwrite"):
        make("changing", "train", tmp_path, num_shards=1)
    make("changing", "train", tmp_path, num_shards=1, overwrite=True)
    data.get_dataset(describe("changing", "train", tmp_path))
    add_task("changing", files, preprocessors=preprocessors.pretraining(preprocessors.masked_tokens))
    data.get_dataset(describe("changing", "train", tmp_path))  # what follows the placeholder is nothing to the cache
    steps = preprocessors.pretraining(preprocessors.span_corruption)
    add_task("changing", files, preprocessors=[steps[0], seqio.preprocessors.tokenize, *steps[2:]])
    refused("stale: its preprocessors")
    with pytest.raises(ValueError, match="'changing' cannot be cached: put seqio.CacheDatasetPlaceholder"):
        add_task("changing", files, preprocessors=[step for step in steps
                                                   if not isinstance(step, seqio.CacheDatasetPlaceholder)])
        data.plan_cache("changing", "train", None, str(tmp_path), 1, False)


def test_a_step_is_known_by_its_code_and_its_fixed_arguments():
    def doubled(dataset, times=2):
        return dataset.repeat(times)

    told = {cache_files._step(step) for step in (
        doubled, functools.partial(doubled, times=3), functools.partial(doubled, times=2),
        preprocessors.span_corruption, tf.autograph.experimental.do_not_convert(preprocessors.span_corruption))}
    assert len(told) == 4 and any("span_corruption: " in step for step in told)


def test_a_split_that_a_task_of_a_mixture_lacks_needs_no_cache(cache):
    provider = pipeline.provider_of(describe("cached_mixture", "validation", cache))
    assert [type(task.source).__name__ for task in provider.tasks] == ["CachedSource", "FileDataSource"]
    assert [task.name for task in tasks_of(provider, "validation")] == ["cached"]
