"""The result of `switch-tf verify-layout`, as a JSON object and as text."""

from switch_tf.partitioning import collectives
from switch_tf.partitioning.collectives import Collective
from switch_tf.partitioning.layout import Layout
from switch_tf.training.verification import LIMIT, Verification

# Differences are judged in this dtype alone. In any other, the order of a sum can decide where a token goes.
JUDGED_DTYPE = "float64"


def as_json(verification: Verification, layout: Layout, dtype: str, sent: list[Collective]) -> dict:
    """Returns the JSON object, with `exit_status` 1 if the differences are too large or an all-to-all is unsafe.

    Args:
        verification: Differences between the layout and one device.
        layout: Layout with its mesh.
        dtype: Compute dtype of the model.
        sent: Collectives of a step.
    """
    num_unsafe = sum(collective.is_unsafe for collective in sent)
    return {
        "loss_relative_difference": verification.loss.value,
        "gradient_relative_difference": verification.gradient.value,
        "weight_difference": verification.weight.value,
        "later_loss_relative_difference": verification.later_loss.value,
        "losses": verification.losses,
        "mesh": layout.mesh,
        "collectives": collectives.summarize(sent),
        "unsafe_all_to_alls": num_unsafe,
        "exit_status": int(num_unsafe > 0 or (dtype == JUDGED_DTYPE and not verification.is_equal)),
    }


def describe(verification: Verification, result: dict, dtype: str) -> str:
    """Returns the differences, the collectives and the verdict as text. `result` is from `as_json`."""
    steps = len(verification.losses)
    rows = {"loss, first step": verification.loss, "gradients, first step": verification.gradient,
            f"loss, {steps} steps": verification.later_loss, f"weights after {steps} steps": verification.weight}
    mesh = ", ".join(f"{axis}={size}" for axis, size in result["mesh"].items())
    lines = [f"Mesh {mesh} against one device, {dtype}.",
             f"Largest relative differences, where rounding explains {LIMIT:.0e}:"]
    lines += [f"  {name:<24} {row.value:.1e}  {row.where}" for name, row in rows.items()]
    if result["collectives"]:
        lines.append("Collectives of a step, before TensorFlow combines any, and their bytes on each device:")
        lines += [f"  {kind:<16} {entry['count']:>5} {entry['bytes']:>14,}"
                  for kind, entry in sorted(result["collectives"].items())]
    else:
        lines.append("No collectives were seen: tf.distribute sums gradients outside of the program.")
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
