"""The checkpoints of a run that is training, as they appear."""

import pathlib
import sys
import time
from collections.abc import Iterable, Iterator

from switch_tf.checkpoints import folders, run_folder
from switch_tf.checkpoints.run_folder import RunFolder

_POLL_SECONDS = 5
# A preempted machine is back within minutes, so the end of a run that was killed is awaited for this long.
_RESTART_SECONDS = 900


def follow(folder: str | pathlib.Path, last_step: int, done: Iterable[int] = ()) -> Iterator[pathlib.Path]:
    """Yields each new checkpoint of a run until the run ends.

    A run records why it ended, unless it was killed. A run that was killed may be restarted, so the wait goes on for
    some minutes. A run may also be restarted with a larger TRAIN_STEPS than `last_step`, and is then followed further.

    Args:
        folder: Run folder.
        last_step: Last step of the run, as configured when the command started.
        done: Steps of checkpoints to leave out.

    Yields:
        Checkpoint folders, oldest first.
    """
    checkpoints, done = RunFolder.checkpoints_of(folder), set(done)
    is_announced, killed_at = False, None
    while True:
        # Read before the checkpoints, because a run writes its last checkpoint first and releases its lock last.
        end, is_running = run_folder.end_of(folder), run_folder.is_running(folder)
        new = [step for step in folders.steps(checkpoints) if step not in done]
        if new:
            is_announced, killed_at = False, None  # the run was alive since then, so the wait starts again
            done.add(new[0])
            yield folders.path_of(checkpoints, new[0])
            continue
        is_complete = bool(done) and max(done) >= last_step
        if is_complete and (end is not None or not is_running):
            return
        if end is not None and not is_running:
            _print(f"The run has ended ({end.rstrip('.')}); all of its checkpoints that were found are evaluated.")
            return
        killed_at = None if is_running else killed_at or time.monotonic()
        if killed_at and time.monotonic() - killed_at > _RESTART_SECONDS:
            _print(f"No process has trained in {folder} for {_RESTART_SECONDS // 60} minutes, and the run did not "
                   "record why it ended, as after a kill. Start the run and this command again.")
            return
        if not is_announced and not is_complete:
            _print(f"Waiting for a checkpoint after step {max(done, default=0)} of {last_step}; Ctrl-C ends this." + (
                f" No process trains there now; in case the run was killed and is started again, this waits "
                f"{_RESTART_SECONDS // 60} minutes." if killed_at else ""))
        is_announced = True
        time.sleep(_POLL_SECONDS)


def _print(text):
    print(text, file=sys.stderr, flush=True)
