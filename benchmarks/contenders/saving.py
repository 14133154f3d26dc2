"""Windows of switch_tf's training steps, with a checkpoint at the start of each or without."""

import secrets
import tempfile
import threading
import time
import types

from switch_tf_step import built

from switch_tf.checkpoints import tensors
from switch_tf.checkpoints.checkpointer import Checkpointer
from switch_tf.storage import places


def window(job):
    """Builds "period" steps; a job with "saves" starts to save before them, one that also "waits" then waits."""
    step, facts, model, optimizer = built(job)
    folder, place = None, places.at(job["folder"])
    if places.is_local(place):
        folder = tempfile.TemporaryDirectory(dir=job["folder"])  # removed with the last reference to it
    place = places.at(folder.name) if folder else place / secrets.token_hex(4)
    batches = types.SimpleNamespace(save=lambda *args: None)
    checkpointer = Checkpointer(place, tensors.state_variables(model, optimizer), batches)
    facts = {**facts, "folder": job["folder"]}
    count = 0

    def save():
        nonlocal count
        count += 1
        started = time.perf_counter()
        checkpointer.save(count)
        facts["blocked_seconds"] = round(time.perf_counter() - started, 3)

        def settle():
            checkpointer.settle()
            facts["commit_seconds"] = round(time.perf_counter() - started, 3)

        settling = threading.Thread(target=settle)
        settling.start()
        if job["waits"]:
            checkpointer.wait()
            facts["blocked_seconds"] = round(time.perf_counter() - started, 3)
            settling.join()

    def run():
        if job["saves"]:
            save()
        for _ in range(job["period"]):
            step()

    run.folder = folder  # as long as the steps
    return run, facts
