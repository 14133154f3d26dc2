"""The verification of a run's layout, with its result as a JSON object and as text."""

import pathlib
import sys
from collections.abc import Sequence

import tensorflow as tf

from switch_tf import data
from switch_tf.configs.experiment import Experiment
from switch_tf.partitioning import collectives
from switch_tf.partitioning.collectives import Collective
from switch_tf.partitioning.layout import Layout
from switch_tf.refusals import Refusal
from switch_tf.training import verification
from switch_tf.training.verification import LIMIT, Verification

# Differences are judged in this dtype alone. In any other, the order of a sum can decide where a token goes.
JUDGED_DTYPE = "float64"


def verify(described: Experiment, num_steps: int, dumps: str | pathlib.Path) -> tuple[dict, str]:
    """Compares training steps of a run under its layout with the same steps on one device.

    Args:
        described: Experiment on this machine's devices.
        num_steps: Training steps to compare.
        dumps: Folder of `collectives.dump_partitioned_programs`.

    Returns:
        (JSON object, text for people).

    Raises:
        Refusal: The data cannot be read, or `steps_per_call` is not 1.
    """
    # The optimisation takes longer, once for each device, than the few steps that follow.
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    run, settings = described.run, described.settings
    if settings.steps_per_call != 1:
        raise Refusal(f"Steps are compared one by one, so steps_per_call must be 1, not {settings.steps_per_call}.")
    description = data.description_of_data(run, described.config, "train", run.seed)
    data.check_examples(description)
    with data.refusing_bad_rows(description):
        batches = list(data.get_dataset(description).take(num_steps))
    if added := described.make_objective().added_features():
        batches = [added.added_to(batch) for batch in batches]
    differences = verification.verify(
        described.make_model, described.make_optimizer, described.partitioner, batches, run.seed, settings,
        say=lambda text: print(text, file=sys.stderr, flush=True), make_objective=described.make_objective)
    sent = [
        *(collective for function in ("computed", "applied") for collective in collectives.read(dumps, function)),
        *collectives.read_xla(differences.program)]
    dtype = described.make_model().compute_dtype
    result = as_json(differences, described.layout, dtype, sent)
    return result, describe(differences, result, dtype)


def as_json(differences: Verification, layout: Layout, dtype: str, sent: Sequence[Collective]) -> dict:
    """Returns the JSON object, with `exit_status` 1 if the differences are too large or an all-to-all is unsafe.

    Args:
        differences: Differences between the layout and one device.
        layout: Layout with its mesh.
        dtype: Compute dtype of the model.
        sent: Collectives of a step.
    """
    num_unsafe = sum(collective.is_unsafe for collective in sent)
    return {
        "loss_relative_difference": differences.loss.value,
        "gradient_relative_difference": differences.gradient.value,
        "weight_difference": differences.weight.value,
        "later_loss_relative_difference": differences.later_loss.value,
        "losses": differences.losses,
        "mesh": layout.mesh,
        "collectives": collectives.summarize(sent),
        "unsafe_all_to_alls": num_unsafe,
        "exit_status": int(num_unsafe > 0 or (dtype == JUDGED_DTYPE and not differences.is_equal)),
    }


def describe(differences: Verification, result: dict, dtype: str) -> str:
    """Returns the differences, the collectives and the verdict as text. `result` is from `as_json`."""
    steps = len(differences.losses)
    rows = {"loss, first step": differences.loss, "gradients, first step": differences.gradient,
            f"loss, {steps} steps": differences.later_loss, f"weights after {steps} steps": differences.weight}
    mesh = ", ".join(f"{axis}={size}" for axis, size in result["mesh"].items())
    lines = [f"Mesh {mesh} against one device, {dtype}.",
             f"Largest relative differences, where rounding explains {LIMIT:.0e}:"]
    lines += [f"  {name:<24} {row.value:.1e}  {row.where}" for name, row in rows.items()]
    if result["collectives"]:
        combined = "as XLA combined them" if differences.program else "before TensorFlow combines any"
        lines.append(f"Collectives of a step, {combined}, and their bytes on each device:")
        lines += [f"  {kind:<16} {entry['count']:>5} {entry['bytes']:>14,}"
                  for kind, entry in sorted(result["collectives"].items())]
    else:
        lines.append("No collectives were seen." if differences.program else
                     "No collectives were seen: tf.distribute sums gradients outside of the program.")
    if result["unsafe_all_to_alls"]:
        lines.append(f"{result['unsafe_all_to_alls']} all-to-alls between two dimensions that are both not the first: "
                     "TensorFlow permutes their data.")
    if result["exit_status"]:
        lines.append("This layout computes something else.")
    elif dtype == JUDGED_DTYPE:
        lines.append("The same numbers.")
    else:
        lines.append(f"Not judged in {dtype}, where the order of a sum can decide where a token goes: leave "
                     "ACTIVATION_DTYPE out.")
    return "\n".join(lines)
