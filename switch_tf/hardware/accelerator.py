"""The type of this machine's TPU."""

import os

from switch_tf.hardware import host, metadata


def accelerator_type() -> str:
    """Returns the type as gcloud spells it, such as "v5litepod-8", or "" if it is unknown."""
    # GKE sets the variable; on a TPU VM only the metadata server has it.
    return os.environ.get("TPU_ACCELERATOR_TYPE") or (metadata.attribute("accelerator-type") if host.has_tpu() else "")
