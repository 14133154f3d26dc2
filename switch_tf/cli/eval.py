"""`switch-tf eval`: the checkpoints of a run, scored by the metrics of their tasks."""

import contextlib
import itertools
import pathlib
import sys
import time

from switch_tf.checkpoints import folders, run_folder
from switch_tf.checkpoints.run_folder import RunFolder
from switch_tf.cli import trained_run
from switch_tf.messages import first_line
from switch_tf.refusals import Refusal

_POLL = 5  # seconds between two looks for a new checkpoint
# Seconds to wait until a run that was killed is restarted: a preempted machine is back within minutes.
_RESTART = 900

EXAMPLES = r"""
switch-tf eval --run runs/first --step best
switch-tf eval --run runs/first --follow
"""


def add_arguments(parser) -> None:
    """Declares the run, which of its checkpoints, the split, and the gin arguments that change its task or layout."""
    trained_run.add_arguments(parser)
    parser.add_argument("--step", default="last", metavar="N|best|last|all",
                        help="a step, the best one by the run's BEST_METRIC, the newest (default) or each of them")
    parser.add_argument("--split", default="validation", metavar="NAME", help="of the tasks (default validation)")
    parser.add_argument("--examples", type=int, metavar="N", help="of each task with metrics at most so many")
    parser.add_argument("--output", metavar="FOLDER", help="where scores and predictions go (default RUN/eval)")
    parser.add_argument("--devices", type=int, metavar="N", help="virtual devices to make of this machine's CPU")
    parser.add_argument("--follow", action="store_true",
                        help="go on with each new checkpoint of a run that is training, until the run ends")


def run(arguments) -> dict:
    """Prints a table for each checkpoint and writes scores and predictions; the scores are the JSON object."""
    folder = trained_run.folder_of(arguments)
    if arguments.examples is not None and arguments.examples < 1:
        raise Refusal(f"--examples must be at least 1, not {arguments.examples}.")
    waits_for_first = arguments.follow and arguments.step == "last"
    checkpoints = [] if waits_for_first else trained_run.checkpoints(folder, arguments.step, hint=", or add --follow")
    described = trained_run.load(arguments, folder, arguments.devices)
    for checkpoint in checkpoints:
        trained_run.check_sizes(described, checkpoint)
    from switch_tf.data import FailedMetric
    from switch_tf.evaluation.evaluating import CheckpointEvaluator
    stream = sys.stderr if arguments.json else sys.stdout
    try:
        evaluator = CheckpointEvaluator(described, arguments.split, arguments.examples,
                                        pathlib.Path(arguments.output or folder / "eval"))
        results = []
        with contextlib.closing(evaluator):
            new = _following(folder, described.run.train_steps, results) if arguments.follow else ()
            for checkpoint in itertools.chain(checkpoints, new):
                try:
                    results.append(evaluator.evaluate(checkpoint))
                except folders.BrokenCheckpoint:
                    if checkpoint.is_dir():
                        raise
                    print(f"{checkpoint} was removed by its run before it was read.", file=sys.stderr, flush=True)
                    continue
                print(_table(results[-1]), file=stream, flush=True)
    except (ValueError, OSError, FailedMetric, folders.BrokenCheckpoint) as error:
        raise Refusal(first_line(error)) from error
    print(f"Scores and predictions: {evaluator.output}", file=stream)
    return {"run": str(folder), "split": arguments.split, "output": str(evaluator.output), "results": results}


def _following(folder, last_step, results):
    """Yields the checkpoints of a run that is training, each as it comes, until the run ends.

    A run that was not killed records why it ended. One that was killed may be restarted, so the wait goes on for a
    while.
    """
    done = {result["step"] for result in results}  # read when the generator starts, after the earlier checkpoints
    is_told, killed_at = False, None
    while not done or max(done) < last_step:
        # Read before the checkpoints, because a run writes its last checkpoint first and releases its lock last.
        end, is_running = run_folder.end_of(folder), run_folder.is_running(folder)
        new = [step for step in folders.steps(RunFolder.checkpoints_of(folder)) if step not in done]
        if new:
            is_told, killed_at = False, None  # the run was alive since then, so the wait starts again
            done.add(new[0])
            yield folders.path_of(RunFolder.checkpoints_of(folder), new[0])
            continue
        if end is not None and not is_running:
            _say(f"The run has ended ({end.rstrip('.')}); all of its checkpoints that were found are evaluated.")
            return
        killed_at = None if is_running else killed_at or time.monotonic()
        if killed_at and time.monotonic() - killed_at > _RESTART:
            _say(f"No process has trained in {folder} for {_RESTART // 60} minutes, and the run did not record why it "
                 "ended, as after a kill. Start the run and this command again.")
            return
        if not is_told:
            _say(f"Waiting for a checkpoint after step {max(done, default=0)} of {last_step}; Ctrl-C ends this." + (
                f" No process trains there now; in case the run was killed and is started again, this waits "
                f"{_RESTART // 60} minutes."
                if killed_at else ""))
        is_told = True
        time.sleep(_POLL)


def _say(text):
    print(text, file=sys.stderr, flush=True)


def _table(result):
    """Tasks down, metrics across."""
    width = max(len("average"), *map(len, result["tasks"]))
    lines = [f"Step {result['step']}:"]
    for task, found in result["tasks"].items():
        lines.append(f"  {task:<{width}}  " + "  ".join(f"{name} {value:.4f}" for name, value in found.items()))
    if result["average"] is not None:
        lines.append(f"  {'average':<{width}}  {result['average']:.4f}")
    return "\n".join(lines)
