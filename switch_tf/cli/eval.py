"""`switch-tf eval`: the checkpoints of a run, scored by the metrics of their tasks."""

import contextlib
import itertools
import pathlib
import sys
import time

from switch_tf.cli import gin_files, gin_run
from switch_tf.cli.main import Mistake
from switch_tf.messages import first_line
from switch_tf.training import checkpoint_folders
from switch_tf.training.run_folder import CONFIGURATION, RunFolder

_POLL = 5  # seconds between two looks for a new checkpoint


def add_arguments(parser) -> None:
    """Declares the run, which of its checkpoints, the split, and the gin arguments that change its task or layout."""
    gin_files.add_arguments(parser)
    parser.add_argument("--run", required=True, metavar="FOLDER", help="a run folder, whose own configuration is used")
    parser.add_argument("--step", default="last", metavar="N|best|last|all",
                        help="a step, the best one by the run's BEST_METRIC, the newest (default) or each of them")
    parser.add_argument("--split", default="validation", metavar="NAME", help="of the tasks (default validation)")
    parser.add_argument("--examples", type=int, metavar="N", help="of each task with metrics at most so many")
    parser.add_argument("--output", metavar="FOLDER", help="where scores and predictions go (default RUN/eval)")
    parser.add_argument("--follow", action="store_true",
                        help="go on with each new checkpoint of a run that is training, until its last step")
    parser.add_argument("--devices", type=int, metavar="N", help="virtual devices to make of this machine's CPU")


def run(arguments) -> dict:
    """Prints a table for each checkpoint and writes scores and predictions; the scores are the JSON object."""
    folder = pathlib.Path(arguments.run)
    if not (folder / CONFIGURATION).is_file():
        raise Mistake(f"--run must name a run folder, which holds {CONFIGURATION}; {str(folder)!r} does not.")
    if arguments.examples is not None and arguments.examples < 1:
        raise Mistake(f"--examples must be at least 1, not {arguments.examples}.")
    waits_for_first = arguments.follow and arguments.step == "last"
    checkpoints = [] if waits_for_first else _chosen(folder, arguments.step)
    arguments.gin_file = [str(folder / CONFIGURATION), *arguments.gin_file]
    gin_run.load(arguments, num_cpu_devices=arguments.devices)
    described = gin_run.on_this_machine(is_checked=False)
    from switch_tf.data import FailedMetric
    from switch_tf.training.evaluating import Evaluating
    stream = sys.stderr if arguments.json else sys.stdout
    try:
        evaluating = Evaluating(described, arguments.split, arguments.examples,
                                pathlib.Path(arguments.output or folder / "eval"))
        results = []
        with contextlib.closing(evaluating):
            new = _following(folder, described.run.train_steps, results) if arguments.follow else ()
            for checkpoint in itertools.chain(checkpoints, new):
                try:
                    results.append(evaluating.evaluate(checkpoint))
                except checkpoint_folders.BrokenCheckpoint:
                    if checkpoint.is_dir():
                        raise
                    print(f"{checkpoint} was removed by its run before it was read.", file=sys.stderr, flush=True)
                    continue
                print(_table(results[-1]), file=stream, flush=True)
    except (ValueError, OSError, FailedMetric, checkpoint_folders.BrokenCheckpoint) as error:
        raise Mistake(first_line(error)) from error
    print(f"Scores and predictions: {evaluating.output}", file=stream)
    return {"run": str(folder), "split": arguments.split, "output": str(evaluating.output), "results": results}


def _chosen(folder, step):
    """The checkpoints that a user means by a step, "best", "last" or "all", oldest first."""
    saved = checkpoint_folders.steps(RunFolder.checkpoints_of(folder))
    if not saved:
        raise Mistake(f"The run folder {str(folder)!r} has no checkpoint yet; train it first, or add --follow.")
    if step == "all":
        chosen = saved
    elif step == "last":
        chosen = saved[-1:]
    elif step == "best":
        best = checkpoint_folders.best(RunFolder.checkpoints_of(folder))
        if best is None:
            raise Mistake(f"The run in {str(folder)!r} keeps no best checkpoint; it does with "
                          "--gin.BEST_METRIC=\"'eval/<task>/<metric>'\".")
        chosen = [best["step"]]
    elif step.isdecimal() and int(step) in saved:
        chosen = [int(step)]
    else:
        raise Mistake(f"--step must be best, last, all or a step with a checkpoint ({', '.join(map(str, saved))}), "
                      f"not {step!r}.")
    return [checkpoint_folders.path_of(RunFolder.checkpoints_of(folder), one) for one in chosen]


def _following(folder, last_step, results):
    """Checkpoints of a run that is training, each as it comes, until that of its last step."""
    done = {result["step"] for result in results}  # asked for when all others are evaluated
    is_told = False
    while not done or max(done) < last_step:
        new = [step for step in checkpoint_folders.steps(RunFolder.checkpoints_of(folder)) if step not in done]
        if not new:
            if not is_told:
                print(f"Waiting for a checkpoint after step {max(done, default=0)} of {last_step}; Ctrl-C ends this.",
                      file=sys.stderr, flush=True)
            is_told = True
            time.sleep(_POLL)
            continue
        is_told = False
        done.add(new[0])
        yield checkpoint_folders.path_of(RunFolder.checkpoints_of(folder), new[0])


def _table(result):
    """Tasks down, metrics across."""
    width = max(len("average"), *map(len, result["tasks"]))
    lines = [f"Step {result['step']}:"]
    for task, found in result["tasks"].items():
        lines.append(f"  {task:<{width}}  " + "  ".join(f"{name} {value:.4f}" for name, value in found.items()))
    if result["average"] is not None:
        lines.append(f"  {'average':<{width}}  {result['average']:.4f}")
    return "\n".join(lines)
