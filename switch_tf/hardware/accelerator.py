"""The type of this machine's TPU, from the environment or from Google Cloud's metadata server."""

import functools
import os
import urllib.error
import urllib.request

from switch_tf.hardware import host

_TIMEOUT = 1  # seconds; the server is on the same host
_PATH = "/computeMetadata/v1/instance/attributes/accelerator-type"


def accelerator_type() -> str:
    """Returns the type as gcloud spells it, such as "v5litepod-8", or "" if it is unknown."""
    return os.environ.get("TPU_ACCELERATOR_TYPE") or (_from_metadata() if host.has_tpu() else "")


@functools.cache
def _from_metadata():
    # GKE sets the variable; on a TPU VM only the metadata server has it.
    server = os.environ.get("GCE_METADATA_HOST", "metadata.google.internal")
    request = urllib.request.Request(f"http://{server}{_PATH}", headers={"Metadata-Flavor": "Google"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=_TIMEOUT) as answer:
            return answer.read().decode().strip()
    except (urllib.error.URLError, OSError, ValueError):  # no such server, or no such attribute
        return ""
