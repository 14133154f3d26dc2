"""Notices of Google Cloud that a TPU VM is about to be stopped, which end a run as a signal does."""

import threading

from switch_tf.hardware import devices, host
from switch_tf.training.stopping import Stopping

# A pre-empted VM has 30 seconds, one with a maintenance event 60, and those only if the entry has been read before.
_PERIOD = 2.0  # seconds
_GRACE = 1.0  # seconds to wait for an answer of the server when the scope ends
# Other values announce that the VM moves to another host while it runs, or nothing.
_MAINTENANCE = "TERMINATE_ON_HOST_MAINTENANCE"


class Notices:
    """A context in which a notice asks to stop. It polls the metadata server, on a TPU VM alone.

    Args:
        stopping: Stopping.
    """

    def __init__(self, stopping: Stopping):
        self._stopping = stopping
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="notices", daemon=True)

    def __enter__(self):
        if devices.device_type() == "TPU" and host.has_tpu():  # and not on the machine that TPU_NAME has it from afar
            self._thread.start()
        return self

    def __exit__(self, *error):
        self._ended.set()
        if self._thread.ident:
            self._thread.join(_GRACE)

    def _watch(self):
        while not self._ended.is_set():
            if reason := _notice():
                self._stopping.stop(reason)
                return
            self._ended.wait(_PERIOD)


def _notice():
    """Returns the reason why this VM is about to be stopped, "" if it is not or no server answers."""
    if host.vm_entry("maintenance-event") == _MAINTENANCE:
        return "maintenance event of this VM"
    return "pre-emption of this VM" if host.vm_entry("preempted") == "TRUE" else ""
