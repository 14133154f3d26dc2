"""Attributes and state of a Google Cloud VM, from its metadata server."""

import functools
import http.client
import os
import urllib.error
import urllib.request

# The address of metadata.google.internal, since a name server may take long where nobody knows that name.
_SERVER = "169.254.169.254"
_TIMEOUT = 1  # seconds; the server is on the same host
_TRIES = 3


@functools.cache
def attribute(name: str) -> str:
    """Returns an attribute of this machine, "" if it has none or no server answers."""
    return entry(f"attributes/{name}")


def entry(name: str) -> str:
    """Returns the present value of an entry of this machine, such as "preempted"; "" as for `attribute`."""
    server = os.environ.get("GCE_METADATA_HOST", _SERVER)
    request = urllib.request.Request(f"http://{server}/computeMetadata/v1/instance/{name}",
                                     headers={"Metadata-Flavor": "Google"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    for _ in range(_TRIES):
        try:
            with opener.open(request, timeout=_TIMEOUT) as answer:
                return answer.read().decode().strip()
        except urllib.error.HTTPError as error:
            if error.code < 500:  # no such entry
                return ""
        except (OSError, ValueError, http.client.HTTPException) as error:  # no such server
            if not isinstance(getattr(error, "reason", error), TimeoutError):
                return ""
    return ""


def tpu_environment(name: str) -> str:
    """Returns a variable of a slice, such as MEGASCALE_NUM_SLICES; "" if it is not set. Lines read NAME: 'value'."""
    for line in attribute("tpu-env").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip().strip("'")
    return ""
