"""The declared names of tasks and vocabularies are those that the modules register."""

import subprocess
import sys

import pytest
import seqio

from switch_tf import tasks
from switch_tf.configs import names
from switch_tf.data import vocabularies


def _registered():
    return {*seqio.TaskRegistry.names(), *seqio.MixtureRegistry.names()}


def test_every_module_registers_what_is_declared():
    for module, declared in tasks.TASKS.items():
        for name in declared:
            names.register_task(name)
        assert set(declared) <= _registered(), module


# In a process of its own, because other tests register tasks with the sources of the package.
_UNDECLARED = """
import seqio
from switch_tf import tasks
from switch_tf.configs import names

def module(name):
    provider = seqio.get_mixture_or_task(name)
    task = getattr(provider, "tasks", [provider])[0]
    return type(task.source).__module__ if hasattr(task, "source") else ""

declared = {name for group in tasks.TASKS.values() for name in group}
for name in declared:
    names.register_task(name)
registered = {*seqio.TaskRegistry.names(), *seqio.MixtureRegistry.names()}
shipped = {name.partition(".")[0] for name in registered if module(name).startswith("switch_tf.tasks.")}
print(len(shipped), sorted(shipped - declared))
"""


@pytest.mark.slow  # it imports seqio and all tasks anew
def test_every_task_of_the_package_is_declared():
    done = subprocess.run([sys.executable, "-c", _UNDECLARED], capture_output=True, text=True)
    count, _, undeclared = done.stdout.strip().rpartition("\n")[2].partition(" ")
    assert int(count) > 5 and undeclared == "[]", done.stdout + done.stderr


def test_vocabularies_are_made_when_they_are_needed():
    assert vocabularies.get_vocabulary("bytes") is vocabularies.get_vocabulary("bytes")
    assert set(tasks.VOCABULARIES) <= set(names.vocabularies())
