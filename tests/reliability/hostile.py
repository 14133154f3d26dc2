"""Replaces each file of a folder by a FIFO, a link, a bomb or damage, and reads the folder.

`python -m tests.reliability.hostile [STORE...]` prints a row for each file, with the number of refusals, the slowest
answer and the largest memory. A process that has imported TensorFlow forks a child for each file and case, so a child
that hangs, crashes or takes all memory ends alone.
"""

import argparse
import os
import pathlib
import resource
import shutil
import signal
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from typing import NamedTuple

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
LONGEST = 20  # seconds, on a machine that does other things
# Bytes of a refusal beyond those of a child that does nothing, and of a reading beyond the undamaged store.
MOST_MEMORY = 500 * 2**20
REFUSED, READ = "refused", "read"  # all that may happen


class Answer(NamedTuple):
    """What a command did.

    Attributes:
        outcome: REFUSED, READ if it did not need the file or could not see the damage, else what is wrong.
        text: Its last line.
        seconds: Wall time.
        memory: Largest resident size of its process, in bytes.
    """

    outcome: str
    text: str
    seconds: float
    memory: int


def _replace(file, make):
    file.unlink()
    make(file)


CASES: dict[str, Callable[[pathlib.Path], object]] = {
    "a FIFO": lambda file: _replace(file, os.mkfifo),
    "a link to a FIFO": lambda file: _replace(file, lambda path: (os.mkfifo("fifo"), path.symlink_to(
        os.path.abspath("fifo")))),
    "a link to itself": lambda file: _replace(file, lambda path: path.symlink_to(path.name)),
    "a link that leads out": lambda file: _replace(file, lambda path: path.symlink_to("/proc/self/environ")),
    "endless": lambda file: _replace(file, lambda path: path.symlink_to("/dev/zero")),
    "a folder": lambda file: _replace(file, pathlib.Path.mkdir),
    "empty": lambda file: file.write_bytes(b""),
    "its first half": lambda file: file.write_bytes(file.read_bytes()[:file.stat().st_size // 2]),
    "brackets": lambda file: file.write_bytes(b"[" * 2**20),
    "quotes": lambda file: file.write_bytes(b"'\\" * 2**19),
    "noise": lambda file: file.write_bytes(bytes(i * i % 251 for i in range(2**16))),
    "ones": lambda file: file.write_bytes(b"\xff" * 2**16),
    "4 TB": lambda file: os.truncate(file, 2**42),
}


def _earlier(folder):
    with zipfile.ZipFile(GOLDEN / "earlier_run.zip") as archive:
        archive.extractall(folder)
    settings = folder / "answers.jsonl.settings.json"
    settings.write_text(settings.read_text().replace("FOLDER", str(folder)))
    (folder / "lines.txt").write_text((folder / "lines.txt").read_text() + "one more\n")


def _checkpoint(folder):
    _earlier(folder)
    (folder / "run/checkpoints/step_00000003").rename(folder / "there")


def _hugging_face(folder):
    shutil.copytree(GOLDEN / "hugging_face/t5_1_1", folder / "there")


def _foreign(write):
    def make(folder):
        from switch_tf.conversion import model_gin
        from tests.conversion import wrong_inputs_test

        os.chdir(folder)
        _, config = getattr(wrong_inputs_test, write)()
        (folder / "model.gin").write_text(model_gin.gin_text(config))

    return make


def _command(*words):
    def run():
        from switch_tf.cli import main

        return main.main(list(words))

    return run


def _batch(gin_file, **changes):
    """Returns a function that reads a batch of a run's training data, with what its objective adds."""
    def run():
        from switch_tf import Experiment, data
        from switch_tf.refusals import Refusal

        try:
            described = Experiment.from_gin(["run/operative_config.gin", gin_file], MODEL_DIR="student", EVAL_PERIOD=0,
                                            **changes)
            description = data.description_of_data(described.run, described.config, "train", described.run.seed)
            data.check_examples(description)
            with data.refusing_bad_rows(description):
                (batch,) = data.get_dataset(description).take(1)
            if added := described.make_objective().added_features():
                added.added_to(batch)
        except Refusal as error:
            print(error, file=sys.stderr)
            return 2
        return 0

    return run


class Store(NamedTuple):
    """A kind of files that this package reads.

    Attributes:
        make: Function that writes one into a folder.
        files: Patterns of its files.
        read: Function that reads it in the working directory and returns an exit status.
    """

    make: Callable[[pathlib.Path], None]
    files: tuple[str, ...]
    read: Callable[[], int]


_CONVERT = ("convert", "--input=there", "--output=out")
STORES = {
    "run": Store(_earlier, ("run/*", "run/checkpoints/*/*"), _command(
        "infer", "--run=run", "--input=lines.txt", "--output=out.jsonl", "--max_length=2")),
    "resumed run": Store(_earlier, ("run/*", "run/checkpoints/*/*"), _command(
        "train", "--gin_file=run/operative_config.gin")),
    "answers": Store(_earlier, ("answers*",), _command(
        "infer", "--run=run", "--input=lines.txt", "--output=answers.jsonl", "--max_length=4")),
    "cache": Store(_earlier, ("cache/*/train/*",), _batch(
        "run/operative_config.gin", USE_CACHED_TASKS=True, CACHE_DIR="cache")),
    "predictions": Store(_earlier, ("predictions/*",), _batch(
        "gin/runs/distill.gin", VOCABULARY="bytes", BATCH_SIZE=4, TEACHER="run", TEACHER_PREDICTIONS="predictions")),
    "checkpoint": Store(_checkpoint, ("there/*",), _command(*_CONVERT, "--to=hugging_face", "--expert_capacity=24")),
    "hugging face": Store(_hugging_face, ("there/*.*on", "there/*.safetensors"), _command(*_CONVERT)),
    "t5x": Store(_foreign("t5x"), ("there/checkpoint", "there/target.encoder.layers_0.mlp.wi.kernel/*",
                                   "there/target.encoder.layers_0.mlp.wi.kernel/.z*"),
                 _command(*_CONVERT, "--gin_file=model.gin")),
    "orbax": Store(_foreign("orbax"), ("there/state/_METADATA", "there/state/manifest.ocdbt", "there/state/d/*"),
                   _command(*_CONVERT, "--gin_file=model.gin")),
    "mesh tensorflow": Store(_foreign("mesh"), ("there/*",), _command(*_CONVERT, "--gin_file=model.gin")),
}


def _in_child(act, log):
    """Returns the exit status or minus the signal of `act` in a child, None if it hangs, its seconds and its memory."""
    started, child = time.monotonic(), os.fork()
    if not child:
        try:
            output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1)
            os.dup2(output, 2)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            status = act()
        except BaseException:
            sys.excepthook(*sys.exc_info())
            status = 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    is_killed = False
    while True:
        done, code, usage = os.wait4(child, os.WNOHANG)
        if done:
            return (None if is_killed else os.waitstatus_to_exitcode(code), time.monotonic() - started,
                    usage.ru_maxrss * 1024)
        if time.monotonic() - started > LONGEST and not is_killed:
            os.kill(child, signal.SIGKILL)
            is_killed = True
        time.sleep(0.005)


def _answer(store, file, case, folder):
    """Reads a store with one damaged file, in a child."""
    log = folder.with_suffix(".log")

    def act():
        shutil.copytree(folder / "whole", folder / "now", symlinks=True)
        os.chdir(folder / "now")
        if file is not None:
            CASES[case](pathlib.Path(file))
        return store.read()

    shutil.rmtree(folder / "now", ignore_errors=True)
    status, seconds, memory = _in_child(act, log)
    text = log.read_text(errors="replace")
    line = (text.strip().splitlines() or [""])[-1]
    if status is None:
        outcome = f"hangs for {LONGEST} s"
    elif status < 0:
        outcome = f"ends by {signal.Signals(-status).name}"
    elif "Traceback" in text or status == 1:
        outcome = "ends in a traceback"
    elif status in (2, 4):
        outcome = REFUSED
    else:
        outcome = READ if status == 0 else f"status {status}"
    return Answer(outcome, line, seconds, memory)


def answers(name: str, is_first: Callable[[str, str], bool] = lambda file, case: True) -> dict[tuple[str, str], Answer]:
    """Returns (file, case) -> Answer for a store.

    ("", "") is the undamaged store, and ("", "idle") a child that does nothing.

    Args:
        name: Key of STORES.
        is_first: Function of a file and a case that returns whether to try it.
    """
    store = STORES[name]
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary) / "store"
        (folder / "whole").mkdir(parents=True)
        # The paths of the store are the same while it is made and read.
        made = folder / "now"
        made.mkdir()
        status, *_ = _in_child(lambda: store.make(made) or 0, folder.with_suffix(".log"))
        assert status == 0, folder.with_suffix(".log").read_text()
        shutil.rmtree(folder / "whole")
        made.rename(folder / "whole")
        files = sorted({str(path.relative_to(folder / "whole")) for pattern in store.files
                        for path in (folder / "whole").glob(pattern) if path.is_file()})
        found = {("", ""): _answer(store, None, None, folder),
                 ("", "idle"): Answer(READ, "", *_in_child(lambda: 0, folder.with_suffix(".log"))[1:])}
        for file in files:
            found |= {(file, case): _answer(store, file, case, folder) for case in CASES if is_first(file, case)}
    return found


def faults(name: str, found: dict[tuple[str, str], Answer]) -> list[str]:
    """Returns a line for each answer that is neither a refusal in a sentence nor a reading, or that costs too much."""
    whole, least = found["", ""], {READ: found["", ""].memory, REFUSED: found["", "idle"].memory}
    lines = [] if whole.outcome == READ else [f"{name}: the undamaged one {whole.outcome} ({whole.text})"]
    for (file, case), answer in found.items():
        if answer.outcome not in (REFUSED, READ):
            lines.append(f"{name}, {file} is {case}: {answer.outcome} ({answer.text[-300:]})")
        elif answer.memory > least[answer.outcome] + MOST_MEMORY:
            lines.append(f"{name}, {file} is {case}: takes {(answer.memory - least[answer.outcome]) / 2**20:.0f} MiB")
        elif answer.outcome == REFUSED and len(answer.text) > 700:
            lines.append(f"{name}, {file} is {case}: refused in {len(answer.text)} characters")
    return lines


def main():
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("stores", nargs="*", help=f"from {', '.join(STORES)}; without one, all")
    arguments = parser.parse_args()
    import tensorflow  # noqa: F401  once, for all children

    import switch_tf  # noqa: F401
    bad = []
    for name in arguments.stores or STORES:
        found = answers(name)
        for file in sorted({file for file, _ in found if file}):
            cells = [found[file, case] for case in CASES]
            count = [sum(answer.outcome == outcome for answer in cells) for outcome in (REFUSED, READ)]
            memory = max((answer.memory - found["", "idle"].memory for answer in cells if answer.outcome == REFUSED),
                         default=0)
            seconds = max(answer.seconds for answer in cells)
            print(f"{name:<16} {file:<60} refused {count[0]:2}, read {count[1]:2}, slowest {seconds:4.1f} s, "
                  f"most memory of a refusal {memory / 2**20:5.0f} MiB", flush=True)
        bad += faults(name, found)
    print("\n".join(bad) or "Every file in every case: refused in a sentence, or read.")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
