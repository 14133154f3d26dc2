"""Names of tasks and vocabularies, declared before seqio and TensorFlow are imported."""

import os
import sys
from collections.abc import Callable, Iterable

from switch_tf import checks
from switch_tf.configs.choices import nearest
from switch_tf.refusals import Refusal

_tasks: dict[str, Callable[[], object]] = {}
_vocabularies: dict[str, Callable] = {}
_registered: set[Callable] = set()  # have added their tasks to seqio's registry


def declare_tasks(names: Iterable[str], register: Callable[[], object]) -> None:
    """Declares seqio tasks and mixtures, to be registered on first use.

    Args:
        names: A mixture "name" also covers its members "name.member". Later declarations win.
        register: Adds them to seqio's registry. Called once.
    """
    _tasks.update(dict.fromkeys(names, register))


def task_names() -> set[str]:
    """Returns all declared names and, if seqio is imported, all registered names."""
    seqio = sys.modules.get("seqio")
    registries = [getattr(seqio, name, None) for name in ("TaskRegistry", "MixtureRegistry")]
    return set(_tasks).union(*(registry.names() for registry in registries if registry))


def check_task(name: str) -> None:
    """Raises Refusal if no task or mixture has this name."""
    checks.text("The name of a task or mixture", name)
    if registers(name) is None and name not in task_names():
        hint = nearest(name, task_names()) or " `switch-tf tasks` lists those that are shipped."
        raise Refusal(f"No task or mixture is called {name!r}.{hint} A gin file provides tasks, for example "
                      "--gin_file=gin/tasks/docs_corpus.gin.")


def registers(name: str) -> Callable[[], object] | None:
    """Returns the function that registers a declared task or mixture, or None."""
    return _tasks.get(name) or _tasks.get(name.partition(".")[0])


def register_task(name: str) -> None:
    """Adds a declared task or mixture to seqio's registry."""
    register = registers(name)
    if register is not None and register not in _registered:
        register()
        _registered.add(register)


def declare_vocabulary(name: str, make: Callable) -> None:
    """Declares a vocabulary by name. `make` returns the seqio vocabulary, always the same object."""
    if not callable(make):
        raise Refusal(f"A vocabulary is registered with a function that makes it, not {checks.shown(make)}.")
    _vocabularies[checks.text("The name of a vocabulary", name)] = make


def check_vocabulary(name: str) -> None:
    """Refuses a VOCABULARY that is neither declared, nor an existing file, nor a URL."""
    if name not in _vocabularies and "://" not in name and not os.path.exists(name):
        known = ", ".join(sorted(_vocabularies)) or "none is registered"
        raise Refusal(f"VOCABULARY {name!r} is no registered vocabulary ({known}), and no SentencePiece model that can "
                      f"be read: there is no such file.{nearest(name, _vocabularies)}")


def vocabularies() -> dict[str, Callable]:
    """Returns the makers of the declared vocabularies, by name."""
    return _vocabularies
