"""Whether weights and gradients find room on a TPU, asked before anything is built."""

from switch_tf.hardware.host import accelerator_type as this_accelerator_type
from switch_tf.refusals import Refusal

# Memory of one device in GiB, by how the accelerator type begins (Cloud TPU documentation).
TPU_GIB = {"v2": 8, "v3": 16, "v4": 32, "v5litepod": 16, "v5p": 95, "v6e": 32}

# Who stores them how, and the way out.
TPU_STRATEGY = ("TPUStrategy keeps weights and gradients whole on each device",
                "use gin/layouts/fully_sharded.gin with backend='dtensor', which stores pieces")
DTENSOR = ("The layout stores weights and gradients in pieces", "use a layout that cuts them into smaller ones "
           "(at_rest_rules), or more devices")


def check(num_bytes: int, storing: tuple[str, str], accelerator_type: str | None = None) -> None:
    """Raises Refusal where this is more than a device's memory.

    Args:
        num_bytes: int, of weights and gradients on one device.
        storing: TPU_STRATEGY or DTENSOR.
        accelerator_type: str, such as "v5litepod-8"; by default this TPU VM's. Of an unknown one nothing is known.
    """
    how, way_out = storing
    kind = (accelerator_type or this_accelerator_type()).partition("-")[0]
    needed, capacity = num_bytes / 2**30, TPU_GIB.get(kind, float("inf"))
    if needed > capacity:
        raise Refusal(f"{how}, {needed:.1f} GiB of them, and a {kind} device has {capacity} GiB; {way_out}.")
