"""The processes that train together, from TF_CONFIG, the variable of TensorFlow's strategies.

    TF_CONFIG={"cluster": {"worker": ["host0:2222", "host1:2222"]}, "task": {"type": "worker", "index": 0}}

`switch-tf train --processes` sets it for processes on one machine. For several machines the program that starts the
processes sets it. Without it, the variables that GKE sets on the hosts of a TPU slice are read:
TPU_WORKER_HOSTNAMES=host0,host1 and TPU_WORKER_ID=0.
"""

import json
import os
from collections.abc import Sequence
from typing import NamedTuple

from switch_tf.refusals import Refusal

# The port at which the processes of a TPU slice meet. libtpu itself uses 8471 and others.
TPU_PORT = 19011


class Cluster(NamedTuple):
    """The processes of a run.

    Attributes:
        addresses: "host:port" of each process, in order.
        index: Index of this process.
    """

    addresses: tuple[str, ...]
    index: int  # type: ignore[assignment]  # hides a method of tuple that nobody calls


def members() -> Cluster:
    """Returns the processes of this run: a single one unless TF_CONFIG or TPU_WORKER_HOSTNAMES names others.

    Raises:
        Refusal: a variable that cannot be read.
    """
    text = os.environ.get("TF_CONFIG")
    if not text:
        return _hosts_of_slice()
    try:
        config = json.loads(text)
        addresses, index = config["cluster"]["worker"], int(config["task"]["index"])
        if set(config["cluster"]) != {"worker"} or not isinstance(addresses, list):
            raise ValueError(f"cluster {config['cluster']}")
        if not 0 <= index < len(addresses) or config["task"].get("type", "worker") != "worker":
            raise ValueError(f"task {config['task']}")
    except (ValueError, KeyError, TypeError) as error:
        raise Refusal(
            'TF_CONFIG must read like {"cluster": {"worker": ["host0:2222", "host1:2222"]}, "task": {"type": "worker", '
            f'"index": 0}}}}, with workers only, not {text!r} ({type(error).__name__}: {error}).') from error
    return Cluster(tuple(addresses), index)


def _hosts_of_slice():
    names = [name.strip() for name in os.environ.get("TPU_WORKER_HOSTNAMES", "").split(",") if name.strip()]
    if len(names) < 2:
        return Cluster(("localhost",), 0)
    index = os.environ.get("TPU_WORKER_ID", "")
    if not index.isdecimal() or int(index) >= len(names):
        raise Refusal(f"TPU_WORKER_HOSTNAMES names {len(names)} hosts, so TPU_WORKER_ID must say which one this is, "
                      f"from 0 to {len(names) - 1}, not {index!r}.")
    return Cluster(tuple(f"{name}:{TPU_PORT}" for name in names), int(index))


def num_hosts(cluster: Cluster) -> int:
    """Returns the number of machines that the processes run on."""
    return len({address.rpartition(":")[0] for address in cluster.addresses})


def put(environ: dict, addresses: Sequence[str], index: int) -> None:
    """Sets TF_CONFIG for one process in a dictionary of environment variables."""
    environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": list(addresses)},
                                       "task": {"type": "worker", "index": index}})


def configure_dtensor(cluster: Cluster) -> None:
    """Sets DTensor's own environment variables for a cluster."""
    os.environ["DTENSOR_JOB_NAME"] = "worker"
    os.environ["DTENSOR_JOBS"] = ",".join(cluster.addresses)
    os.environ["DTENSOR_CLIENT_ID"] = str(cluster.index)
    os.environ["DTENSOR_NUM_CLIENTS"] = str(len(cluster.addresses))
