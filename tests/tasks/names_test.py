"""The declared names of tasks and vocabularies are those that the modules register."""

import seqio

from switch_tf import tasks
from switch_tf.configs import names
from switch_tf.data import vocabularies


def _registered():
    return {*seqio.TaskRegistry.names(), *seqio.MixtureRegistry.names()}


def test_every_module_registers_what_is_declared():
    before = _registered()  # by other tests, some of them with the sources of the package
    for module, declared in tasks.TASKS.items():
        for name in declared:
            names.register_task(name)
        assert set(declared) <= _registered(), module
    shipped = {name for name in _registered() - before if _module(name).startswith("switch_tf.tasks.")}
    assert {name.partition(".")[0] for name in shipped} <= {name for group in tasks.TASKS.values() for name in group}


def _module(name):
    """Returns the module that defines the source of a task; that of a mixture is its first task's."""
    provider = seqio.get_mixture_or_task(name)
    task = getattr(provider, "tasks", [provider])[0]
    return type(task.source).__module__ if hasattr(task, "source") else ""


def test_vocabularies_are_made_when_they_are_needed():
    assert vocabularies.get_vocabulary("bytes") is vocabularies.get_vocabulary("bytes")
    assert set(tasks.VOCABULARIES) <= set(names.vocabularies())
