"""An Apache Beam pipeline of one step: each worker writes whole shards of a cache."""

import contextlib
import dataclasses
import json
import logging
import threading
import time
from collections.abc import Callable, Sequence

from tqdm import tqdm

from switch_tf.data.cache_writing import Shard, is_complete, write
from switch_tf.refusals import Refusal, first_line
from switch_tf.storage import outputs, places

_POLL_SECONDS = 0.5


def incomplete(shards: Sequence[Shard]) -> list[Shard]:
    """Returns the shards that have to be written; reads those that exist once, to verify them."""
    existing = [shard for shard in shards if shard.description.exists()]
    if not existing:
        return list(shards)
    complete = {shard.file for shard in tqdm(existing, desc="checking what is there", unit=" shards", mininterval=0.5)
                if is_complete(shard)}
    return [shard for shard in shards if shard.file not in complete]


def run(shards: Sequence[Shard], num_shards: int, prepare: Callable[[], None], flags: Sequence[str],
        num_processes: int) -> None:
    """Writes shards in Apache Beam's workers and shows the progress.

    Args:
        shards: Incomplete shards of a cache.
        num_shards: Number of shards of the cache, complete ones included.
        prepare: Function that registers the task in a worker. Beam pickles it.
        flags: Flags of Apache Beam. Without `--runner`, the workers are processes of this machine.
        num_processes: Number of workers on this machine, at least 1.

    Raises:
        Refusal: Beam is missing or refuses its flags, or a shard could not be written. All others are.
    """
    beam = _import_beam()
    done = threading.Event()
    watcher = threading.Thread(target=_show_progress, args=(shards, num_shards, done), daemon=True)
    try:
        options = beam.options.pipeline_options.PipelineOptions(_all_flags(flags, min(num_processes, len(shards))))
        for shard in shards:
            _failure_file(shard).unlink(missing_ok=True)
        watcher.start()
        try:
            with beam.Pipeline(options=options) as pipeline:
                # Plain values, because unpickling a Shard would import TensorFlow before `setup` does so quietly.
                _ = (pipeline | beam.Create([dataclasses.asdict(shard) for shard in shards]) | beam.Reshuffle()
                     | beam.ParDo(_do_fn(beam)(prepare)))
        finally:
            done.set()
            watcher.join()
    except SystemExit as error:  # argparse's, which has printed the reason
        raise Refusal(f"Apache Beam does not take {' '.join(flags)}, as it says above.") from error
    except (ValueError, OSError, RuntimeError) as error:
        raise Refusal(f"Apache Beam ended with: {first_line(error)} The shards that are written stay; the same command "
                      "goes on.") from error
    _check_failures(shards, num_shards)


def _check_failures(shards, num_shards):
    files = [_failure_file(shard) for shard in shards if _failure_file(shard).exists()]
    if not files:
        if missing := [shard for shard in shards if not shard.description.exists()]:  # nor the reason
            raise Refusal(f"{len(missing)} of {num_shards} shards could not be written to {missing[0].folder}; make "
                          "room there, or mend its rights. The same command goes on.")
        return
    sentence = json.loads(files[0].read_text())["sentence"]
    for file in files:
        file.unlink()
    raise Refusal(f"{sentence} {len(files)} of {num_shards} shards are not written, the others are; the same command "
                  "goes on.")


def _import_beam():
    logging.getLogger("apache_beam").setLevel(logging.ERROR)
    try:
        with outputs.held_back():
            import apache_beam.options.pipeline_options  # here, because the extra may be missing and prints a lot
    except ImportError as error:
        raise Refusal(f"`switch-tf cache` runs on Apache Beam, which cannot be imported ({error}): pip install "
                      "'switch-tf[beam]', or apache-beam as requirements-dev.txt pins it.") from error
    return apache_beam


def _all_flags(flags, num_workers):
    if any(flag.startswith("--runner") for flag in flags):
        return list(flags)
    mode = "multi_processing" if num_workers > 1 else "in_memory"
    return ["--runner=DirectRunner", f"--direct_running_mode={mode}", f"--direct_num_workers={num_workers}",
            "--default_sdk_harness_log_level=ERROR", *flags]


def _do_fn(beam):
    """Returns the class of the pipeline's step, which is defined late because Beam is imported late."""

    class WriteShard(beam.DoFn):
        def __init__(self, prepare):
            self._prepare = prepare

        def setup(self):
            self._prepare()

        def process(self, fields):
            # A name of this module would be imported, and TensorFlow with it, before `setup` does so quietly.
            from switch_tf.data import cache_pipeline

            cache_pipeline.write_or_note(fields)

    return WriteShard


def write_or_note(fields: dict) -> None:
    """Writes a shard, given as a dict of its fields, or leaves a note with the reason for the command to raise."""
    shard = Shard(**fields)
    try:
        write(shard)
    except Refusal as error:
        with contextlib.suppress(OSError):  # then the shard's description is missing
            _failure_file(shard).write_text(json.dumps({"sentence": first_line(error)}))


def _failure_file(shard):
    """Returns the file in which a worker leaves the reason why a shard could not be written."""
    return places.at(shard.folder) / f".{shard.file.name}.failure"


def _show_progress(shards, num_shards, done):
    """Shows the number of complete shards and their examples until `done` is set."""
    started, waiting, examples = time.perf_counter(), set(shards), 0
    with tqdm(total=num_shards, initial=num_shards - len(shards), desc="tokenising", unit=" shards",
              mininterval=0.5) as progress:
        is_last = False
        while not is_last:
            is_last = done.wait(_POLL_SECONDS)
            for shard in [shard for shard in waiting if shard.description.exists()]:
                waiting.remove(shard)
                examples += json.loads(shard.description.read_text())["examples"]
                rate = examples / (time.perf_counter() - started)
                progress.set_postfix_str(f"{examples:,} examples, {rate:,.0f} a second", refresh=False)
                progress.update()
