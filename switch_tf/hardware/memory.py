"""Whether weights and gradients fit into the memory of a TPU device, before anything is built."""

from switch_tf.hardware import accelerator, chips
from switch_tf.refusals import Refusal


def check(num_bytes: int, storage: str, remedy: str, accelerator_type: str | None = None) -> None:
    """Raises Refusal if a device has less memory. The memory of an unknown device is unlimited.

    Args:
        num_bytes: int, of weights and gradients on one device.
        storage: str, how the back end stores them: the start of the message.
        remedy: str, the end of the message.
        accelerator_type: str, such as "v5litepod-8", by default the type of this TPU VM.
    """
    accelerator_type = accelerator_type or accelerator.accelerator_type()
    chip = chips.of_accelerator_type(accelerator_type)
    if chip is not None and num_bytes > chip.capacity:
        name = accelerator_type.partition("-")[0]
        raise Refusal(f"{storage}, {num_bytes / 2**30:.1f} GiB of them, and a {name} device has "
                      f"{chip.capacity / 2**30:g} GiB; {remedy}.")
