"""Writes a task's cache shard by shard, by any process and in any order.

A shard appears complete or not at all, so a killed command resumes with the missing shards.
"""

import contextlib
import dataclasses
import itertools
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tqdm import tqdm

from switch_tf import environment
from switch_tf.data import cache_files
from switch_tf.data.cache_files import write_records
from switch_tf.data.pipeline import failure, no_global_seed, set_options
from switch_tf.data.vocabularies import get_provider, read_part, tasks_of
from switch_tf.refusals import Refusal, first_line
from switch_tf.storage import json_lines, leftovers, outputs, places
from switch_tf.storage.whole_file import write_whole

# for sources of fewer files, so that several processes can share them
FEWEST_SHARDS = 8
_MOST_SHARDS = 1024
_BYTES_PER_SHARD = 32 * 2**20  # of text
_OWN = re.compile(r"\d{5,}-of-\d{5,}\.(array_record|json)|(request|manifest)\.json|"
                  r"\.\d{5,}-of-\d{5,}\.array_record\.failure")
_DISTRIBUTIONS = ("switch-tf", "seqio", "t5", "tensorflow", "tensorflow-datasets", "tensorflow-text", "sentencepiece")
_POLL_SECONDS = 0.5
_SEED = 0  # of the few random steps before the placeholder


@dataclasses.dataclass(frozen=True)
class Shard:
    """One file of the cache.

    Args:
        folder: Folder of the split.
        vocabulary: Replaces the task's vocabulary, unless None.
    """

    folder: str
    task: str
    split: str
    vocabulary: str | None
    index: int
    count: int

    @property
    def file(self) -> Any:
        """Path of the examples."""
        return places.at(self.folder) / f"{self.index:05d}-of-{self.count:05d}.array_record"

    @property
    def description(self) -> Any:
        """Path of counts and checksum. Exists once the shard is complete."""
        return self.file.with_suffix(".json")

    @property
    def failure(self) -> Any:
        """Path of a note why the shard could not be written."""
        return places.at(self.folder) / f".{self.file.name}.failure"


def plan_cache(mixture_or_task_name: str, split: str, vocabulary: str | None, cache_dir: str | None,
               num_shards: int | None, overwrite: bool,
               lock: Callable[[Any], object] = lambda folder: None) -> list[Shard]:
    """Creates the folders of a split's cache and returns all its shards.

    Args:
        num_shards: Shards of the train split. None means one for each source file, more if files are few or large. Any
            other split has one for each source file, to keep its order.
        overwrite: Deletes existing shards.
        lock: Called with each folder before anything in it changes.
    """
    tasks, shards = tasks_of(get_provider(mixture_or_task_name, vocabulary), split), []
    for task in tasks:
        cache_files.placeholder_of(task)
    for task in tasks:
        folder, count = cache_files.folder_of(cache_dir, task.name, split), _num_shards(task.source, split, num_shards)
        wanted = {**cache_files.request(task, split), "num_shards": count}
        lock(folder)
        cache_files.begin(folder, "request.json", wanted, _OWN, overwrite)
        shards += [Shard(str(folder), task.name, split, vocabulary, index, count) for index in range(count)]
    return shards


def is_complete(shard: Shard) -> bool:
    """Whether a shard has its recorded size and checksum, see `cache_files.is_unchanged`."""
    if not (shard.description.is_file() and shard.file.is_file()):  # links may lead to themselves or to nothing
        return False
    try:
        description = json_lines.load(shard.description)
        size, sha256 = description["bytes"], description["sha256"]
    except (ValueError, LookupError, TypeError):  # a damaged description
        return False
    return places.size(shard.file) == size and cache_files.is_unchanged(shard.file, sha256)


@no_global_seed()
def write_shard(shard: Shard) -> None:
    """Reads, tokenises and writes one shard."""
    task = get_provider(shard.task, shard.vocabulary)
    counts, num_examples = dict.fromkeys(task.output_features, 0), 0

    def records():
        nonlocal num_examples
        for example in dataset.as_numpy_iterator():
            # seqio's function is slow: it makes a tensor of every feature first.
            yield tf.train.Example(features=tf.train.Features(feature={
                name: _feature(np.asarray(value)) for name, value in example.items()})).SerializeToString()
            num_examples += 1
            for name in counts:
                counts[name] += int(np.size(example.get(name, ())))

    try:
        dataset = read_part(task.source, shard.split, shard.index, shard.count, _SEED)
        dataset = task.preprocess_precache(dataset, seed=_SEED + shard.index)
        dataset = set_options(dataset.prefetch(tf.data.AUTOTUNE))
        features = _features(task, dataset)
        sums = write_records(shard.file, records())
        write_whole(shard.description, json_lines.dumps({
            "file": shard.file.name, "examples": num_examples, "tokens": counts, "features": features,
            **sums}, indent=1))
    except Refusal:
        raise
    except Exception as error:  # any kind, from the user's preprocessors
        raise Refusal(failure(task, shard.split, error)) from error


def finish_cache(shards: list[Shard]) -> list[dict]:
    """Writes the manifests of splits with complete shards; returns a summary of each."""
    summaries = []
    for name, group in itertools.groupby(shards, lambda shard: shard.folder):
        folder, members = places.at(name), list(group)
        written = [json_lines.load(shard.description) for shard in members]
        request = json_lines.load(folder / "request.json")
        request.pop("num_shards")
        features = [shard.pop("features") for shard in written]
        sizes = {"examples": sum(shard["examples"] for shard in written),
                 "tokens": {feature: sum(shard["tokens"][feature] for shard in written)
                            for feature in written[0]["tokens"]},
                 "bytes": sum(shard["bytes"] for shard in written)}
        # TensorFlow may be installed as tensorflow-tpu.
        versions = {package: environment.installed_version(package) or "not installed" for package in _DISTRIBUTIONS}
        write_whole(folder / "manifest.json", json_lines.dumps(
            {"request": request, "versions": versions, "features": features[0], **sizes, "shards": written}, indent=1))
        leftovers.remove_unfinished(folder)
        summaries.append({"task": members[0].task, "split": members[0].split, "folder": name,
                          "num_shards": len(members), **sizes})
    return summaries


def line_of(cache: dict) -> str:
    """Returns the line that `switch-tf cache` prints about a summary."""
    tokens = ", ".join(f"{count:,} tokens of {feature}" for feature, count in cache["tokens"].items() if count)
    return (f"{cache['task']}, split {cache['split']}: {cache['examples']:,} examples, {tokens}, "
            f"{cache['bytes'] / 2**20:.1f} MB in {cache['num_shards']} shards: {cache['folder']}")


def _num_shards(source, split, wanted):
    files = source.list_shards(split)
    if split != "train":  # other shards would change the order
        return len(files)
    if wanted is not None:
        return wanted
    if not source.supports_arbitrary_sharding:
        return max(len(files), FEWEST_SHARDS)
    size = sum(os.path.getsize(file) for file in files if os.path.exists(file))
    return min(_MOST_SHARDS, max(len(files), FEWEST_SHARDS, size // _BYTES_PER_SHARD))


def _features(task, dataset):
    features = {}
    for name, spec in dataset.element_spec.items():
        if not isinstance(spec, tf.TensorSpec) or spec.shape.rank is None or None in spec.shape[1:]:
            raise Refusal(f"Task {task.name!r} cannot be cached: its feature {name!r}, {spec}, is no scalar and no "
                          "sequence of entries of one shape.")
        if not (spec.dtype in (tf.string, tf.float32) or spec.dtype.is_integer or spec.dtype.is_bool):
            raise Refusal(f"Task {task.name!r} cannot be cached: its feature {name!r} is {spec.dtype.name}, and a "
                          "tf.train.Example holds texts, whole numbers and float32.")
        features[name] = {"shape": [None, *spec.shape[1:]] if spec.shape.rank else [], "dtype": spec.dtype.name}
    return features


def _feature(value):
    flat = value.reshape(-1)
    if flat.dtype.kind in "OSU":
        return tf.train.Feature(bytes_list=tf.train.BytesList(value=flat.tolist()))
    if flat.dtype.kind in "iub":
        return tf.train.Feature(int64_list=tf.train.Int64List(value=flat.astype(np.int64)))
    return tf.train.Feature(float_list=tf.train.FloatList(value=flat.astype(np.float32)))


def incomplete(shards: Sequence[Shard]) -> list[Shard]:
    """Returns the shards to write, after verifying existing ones."""
    is_new = not any(shard.description.exists() for shard in shards)
    return [shard for shard in tqdm(shards, desc="checking what is there", unit=" shards", mininterval=0.5,
                                    disable=is_new) if not is_complete(shard)]


def run(shards: Sequence[Shard], num_shards: int, prepare: Callable[[], None], flags: Sequence[str],
        num_processes: int) -> None:
    """Writes shards in Apache Beam's workers and shows the progress.

    Args:
        shards: Incomplete shards.
        num_shards: Number of shards of the whole cache.
        prepare: Registers the task in a worker. Beam pickles it.
        flags: Flags of Beam. Without `--runner`, workers are processes of this machine.
        num_processes: Number of workers on this machine, at least 1.
    """
    logging.getLogger("apache_beam").setLevel(logging.ERROR)
    try:
        with outputs.held_back():
            import apache_beam as beam  # the extra may be missing and prints a lot
            from apache_beam.options.pipeline_options import PipelineOptions
    except ImportError as error:
        raise Refusal(f"`switch-tf cache` runs on Apache Beam, which cannot be imported ({error}): pip install "
                      "'switch-tf[beam]', or apache-beam as requirements-dev.txt pins it.") from error

    class WriteShard(beam.DoFn):
        def __init__(self, prepare):
            self._prepare = prepare

        def setup(self):
            self._prepare()

        def process(self, fields):
            # A global name would import TensorFlow before `setup` does so quietly.
            from switch_tf.data import cache_writing

            cache_writing.write_or_note(fields)

    num_workers, defaults = min(num_processes, len(shards)), []
    if not any(flag.startswith("--runner") for flag in flags):
        defaults = ["--runner=DirectRunner", f"--direct_num_workers={num_workers}",
                    f"--direct_running_mode={'multi_processing' if num_workers > 1 else 'in_memory'}",
                    "--default_sdk_harness_log_level=ERROR"]
    done = threading.Event()
    watcher = threading.Thread(target=_show_progress, args=(shards, num_shards, done), daemon=True)
    try:
        options = PipelineOptions([*defaults, *flags])
        for shard in shards:
            shard.failure.unlink(missing_ok=True)
        watcher.start()
        try:
            with beam.Pipeline(options=options) as pipeline:
                # Plain values, because unpickling a Shard would import TensorFlow, too.
                _ = (pipeline | beam.Create([dataclasses.asdict(shard) for shard in shards]) | beam.Reshuffle()
                     | beam.ParDo(WriteShard(prepare)))
        finally:
            done.set()
            watcher.join()
    except SystemExit as error:  # argparse has printed the reason
        raise Refusal(f"Apache Beam does not take {' '.join(flags)}, as it says above.") from error
    except (ValueError, OSError, RuntimeError) as error:
        raise Refusal(f"Apache Beam ended with: {first_line(error)} The shards that are written stay; the same command "
                      "goes on.") from error
    _check_failures(shards, num_shards)


def _check_failures(shards, num_shards):
    files = [shard.failure for shard in shards if shard.failure.exists()]
    if not files:
        if missing := [shard for shard in shards if not shard.description.exists()]:  # their notes failed, too
            raise Refusal(f"{len(missing)} of {num_shards} shards could not be written to {missing[0].folder}; make "
                          "room there, or mend its rights. The same command goes on.")
        return
    sentence = json_lines.load(files[0])["sentence"]
    for file in files:
        file.unlink()
    raise Refusal(f"{sentence} {len(files)} of {num_shards} shards are not written, the others are; the same command "
                  "goes on.")


def write_or_note(fields: dict) -> None:
    """Writes a shard, or a note of the reason for the command to raise."""
    shard = Shard(**fields)
    try:
        write_shard(shard)
    except Refusal as error:
        with contextlib.suppress(OSError):  # then the shard's description is missing
            shard.failure.write_text(json_lines.dumps({"sentence": first_line(error)}))


def _show_progress(shards, num_shards, done):
    started, waiting, examples = time.perf_counter(), set(shards), 0
    with tqdm(total=num_shards, initial=num_shards - len(shards), desc="tokenising", unit=" shards",
              mininterval=0.5) as progress:
        is_last = False
        while not is_last:
            is_last = done.wait(_POLL_SECONDS)
            for shard in [shard for shard in waiting if shard.description.exists()]:
                waiting.remove(shard)
                examples += json_lines.load(shard.description)["examples"]
                rate = examples / (time.perf_counter() - started)
                progress.set_postfix_str(f"{examples:,} examples, {rate:,.0f} a second", refresh=False)
                progress.update()
