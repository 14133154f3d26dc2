"""`switch-tf verify-layout`: the step of a gin run under its layout, compared with the same step on one device."""

import sys
import tempfile

from switch_tf import environment
from switch_tf.cli import gin_files, gin_run
from switch_tf.messages import first_line
from switch_tf.refusals import Refusal

# Of models that compute in it differences are judged: in any other the order of a sum can decide where a token goes.
JUDGED = "float64"

EXAMPLES = r"""
switch-tf verify-layout --gin_file=gin/models/switch_tiny.gin --gin_file=gin/tasks/docs_corpus.gin \
    --gin_file=gin/runs/pretrain.gin --gin_file=gin/layouts/expert.gin --gin.BATCH_SIZE=16
switch-tf verify-layout --gin_file=gin/runs/demo.gin --gin_file=gin/layouts/data.gin --devices 4
"""


def add_arguments(parser) -> None:
    """Declares the gin arguments, `--devices` and `--steps`."""
    gin_files.add_arguments(parser)
    parser.add_argument("--devices", type=int, default=8, metavar="N", help="virtual CPU devices (default 8)")
    parser.add_argument("--steps", type=int, default=3, metavar="N", help="training steps to compare (default 3)")


def run(arguments) -> dict:
    """Prints the largest differences and the collectives; the same as a JSON object. Status 1 where they are too large.

    Everything is computed in float64 unless ACTIVATION_DTYPE says otherwise; MODEL_DIR is not needed.
    """
    if arguments.steps < 1 or arguments.devices < 1:
        raise Refusal(f"--steps and --devices must be at least 1, not {arguments.steps} and {arguments.devices}.")
    with tempfile.TemporaryDirectory() as dumps:
        environment.dump_partitioned_programs(dumps)
        gin_run.load(arguments, ["MODEL_DIR='unused'", f"ACTIVATION_DTYPE='{JUDGED}'"], arguments.devices)
        _skip_graph_optimisation()
        try:
            verification, layout, dtype = _verify(arguments.steps)
        except ValueError as error:
            raise Refusal(first_line(error)) from error
        from switch_tf.partitioning import collectives
        sent = [one for function in ("computed", "applied") for one in collectives.read(dumps, function)]
    result = {
        "loss_relative_difference": verification.loss.value,
        "gradient_relative_difference": verification.gradient.value,
        "weight_difference": verification.weight.value,
        "later_loss_relative_difference": verification.later_loss.value,
        "losses": verification.losses,
        "mesh": layout.mesh,
        "collectives": collectives.summarize(sent),
        "unsafe_all_to_alls": sum(one.is_unsafe for one in sent),
    }
    result["exit_status"] = int(
        result["unsafe_all_to_alls"] > 0 or (dtype == JUDGED and not verification.is_equal))
    print(_describe(verification, result, layout, dtype), file=sys.stderr if arguments.json else sys.stdout)
    return result


def _skip_graph_optimisation():
    """TensorFlow would do it once for each device, which takes longer than the few steps that follow."""
    import tensorflow as tf
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})


def _verify(num_steps):
    from switch_tf import data
    from switch_tf.training import verification

    described = gin_run.on_this_machine()
    run, settings = described.run, described.settings
    if settings.steps_per_call != 1:
        raise ValueError(f"Steps are compared one by one, so steps_per_call must be 1, not {settings.steps_per_call}.")
    description = data.description_of_data(run, described.config, "train", run.seed)
    data.check_examples(description)
    batches = data.get_dataset(description).take(num_steps)
    found = verification.verify(
        described.make_model, described.make_optimizer, described.partitioner, list(batches), run.seed, settings,
        say=lambda text: print(text, file=sys.stderr, flush=True), make_objective=described.make_objective)
    return found, described.layout, described.make_model().compute_dtype


def _describe(verification, result, layout, dtype):
    from switch_tf.training.verification import LIMIT

    steps = len(verification.losses)
    rows = {"loss, first step": verification.loss, "gradients, first step": verification.gradient,
            f"loss, {steps} steps": verification.later_loss, f"weights after {steps} steps": verification.weight}
    lines = [f"Mesh {', '.join(f'{axis}={size}' for axis, size in layout.mesh.items())} against one device, {dtype}.",
             f"Largest relative differences, where rounding explains {LIMIT:.0e}:"]
    lines += [f"  {name:<24} {found.value:.1e}  {found.where}" for name, found in rows.items()]
    if result["collectives"]:
        lines.append("Collectives of a step, before TensorFlow combines any, and their bytes on each device:")
        lines += [f"  {kind:<16} {entry['count']:>5} {entry['bytes']:>14,}"
                  for kind, entry in sorted(result["collectives"].items())]
    else:
        lines.append("No collectives were seen: tf.distribute sums gradients outside of the program.")
    if result["unsafe_all_to_alls"]:
        lines.append(f"{result['unsafe_all_to_alls']} all-to-alls between two dimensions that are both not the first: "
                     "TensorFlow permutes their data.")
    lines.append("This layout computes something else." if result["exit_status"] else
                 "The same numbers." if dtype == JUDGED else f"Not judged in {dtype}, where the order of a sum can "
                 f"decide where a token goes: leave ACTIVATION_DTYPE out.")
    return "\n".join(lines)
