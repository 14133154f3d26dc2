"""The processes that train together, from TF_CONFIG as in TensorFlow's strategies.

    TF_CONFIG={"cluster": {"worker": ["host0:2222", "host1:2222"]}, "task": {"type": "worker", "index": 0}}

`switch-tf train --processes` sets it on one machine. Without it, the nodes of a job step come from Slurm, and the hosts
of a TPU slice from GKE's variables, TPU_WORKER_HOSTNAMES=host0,host1 and TPU_WORKER_ID=0, or from a TPU VM's metadata
server.
"""

import errno
import json
import os
import re
import socket
import subprocess
from collections.abc import Sequence
from typing import NamedTuple

from switch_tf.hardware import host
from switch_tf.refusals import Refusal, first_line

# Processes of a TPU slice or of Slurm meet here. libtpu uses 8471 and further ports.
TPU_PORT = 19011


class Cluster(NamedTuple):
    """The processes of a run.

    Attributes:
        addresses: "host:port" of each process.
        index: This process.
    """

    addresses: tuple[str, ...]
    index: int  # type: ignore[assignment]  # hides an unused method of tuple

    @property
    def num_hosts(self) -> int:
        """Number of machines that run the processes."""
        return len({address.rpartition(":")[0] for address in self.addresses})


def members() -> Cluster:
    """Returns this run's processes: from TF_CONFIG, Slurm, a TPU slice, or only this one."""
    text = os.environ.get("TF_CONFIG")
    if not text:
        return _nodes_of_step() or _hosts_of_slice()
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


def _nodes_of_step():
    """Returns the processes that `srun` started, or None."""
    count, nodes = os.environ.get("SLURM_STEP_NUM_TASKS", "1"), os.environ.get("SLURM_STEP_NODELIST", "")
    if count == "1":
        return None
    try:
        names = subprocess.run(["scontrol", "show", "hostnames", nodes], capture_output=True, text=True,
                               check=True).stdout.split()
    except (OSError, subprocess.CalledProcessError) as error:
        raise Refusal(f"srun started {count} processes, and Slurm's `scontrol show hostnames {nodes}` does not name "
                      f"their nodes ({first_line(error)}); name them in TF_CONFIG.") from error
    if count != str(len(names)):
        raise Refusal(f"srun must start one process on each node, which takes all devices of it, not {count} on "
                      f"{len(names)}; use --ntasks-per-node=1, or name the processes in TF_CONFIG.")
    return Cluster(tuple(f"{name}:{TPU_PORT}" for name in names), int(os.environ["SLURM_PROCID"]))


def _hosts_of_slice():
    names, index = [], ""
    num_slices = os.environ.get("MEGASCALE_NUM_SLICES")
    if hosts := os.environ.get("TPU_WORKER_HOSTNAMES"):  # GKE's variables
        names = [name.strip() for name in hosts.split(",") if name.strip()]
        index = os.environ.get("TPU_WORKER_ID", "")
    elif host.has_tpu() and (index := host.vm_attribute("agent-worker-number")):
        # Attributes of a TPU VM as JAX and libtpu read them. A host is "address" or, formerly, "name:number:address".
        names = [entry.rpartition(":")[2].strip()
                 for entry in host.vm_attribute("worker-network-endpoints").split(",")]
        match = re.search(r"^ *MEGASCALE_NUM_SLICES *: *'?(\w+)", host.vm_attribute("tpu-env"), re.MULTILINE)
        num_slices = num_slices or match and match[1]
    num_slices = num_slices or "1"
    if num_slices != "1" and host.has_tpu():
        raise Refusal(f"This TPU is one of {num_slices} slices (MEGASCALE_NUM_SLICES), and each slice would train a "
                      "model of its own; name the hosts of all slices in TF_CONFIG, or use one slice.")
    if len(names) < 2:
        return Cluster(("localhost",), 0)
    if not index.isdecimal() or int(index) >= len(names):
        raise Refusal(f"This TPU slice has {len(names)} hosts, so TPU_WORKER_ID must say which one this is, from 0 to "
                      f"{len(names) - 1}, not {index!r}.")
    return Cluster(tuple(f"{name}:{TPU_PORT}" for name in names), int(index))


def listening_address(address: str) -> str:
    """Returns the address at which the first process listens: its own, or all if no interface has it.

    Any host that reaches it can read and write the processes' messages. `address` is "host:port" for the other
    processes.
    """
    name, _, port = address.rpartition(":")
    if not port.isdecimal():
        raise Refusal(f"The address of a process must be host:port, not {address!r}.")
    try:
        addresses = [(family, ip) for family, *_, (ip, *_) in socket.getaddrinfo(
            name.strip("[]"), None, type=socket.SOCK_STREAM)]
    except OSError:  # other machines may resolve the name
        addresses = []
    for family, ip in [*addresses, (socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET, "")]:
        try:
            is_dual = family == socket.AF_INET6 and not ip
            socket.create_server((ip, int(port)), family=family, dualstack_ipv6=is_dual).close()
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                continue
            raise Refusal(f"The first process cannot listen at port {port} of {address} ({first_line(error)}); choose "
                          "another port, in all processes.") from error
        return f"[{ip or '::'}]:{port}" if family == socket.AF_INET6 else f"{ip or '0.0.0.0'}:{port}"
    raise Refusal(f"The first process cannot listen at {address}, which is no address of this machine; name one, in "
                  "all processes.")


def put(environ: dict, addresses: Sequence[str], index: int) -> None:
    """Sets one process's TF_CONFIG in environment variables."""
    environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": list(addresses)},
                                       "task": {"type": "worker", "index": index}})
