"""Names of tasks and vocabularies are known before what they stand for is imported."""

import pytest

from switch_tf.configs import names
from switch_tf.refusals import Refusal


@pytest.fixture(autouse=True)
def _own_names(monkeypatch):
    for name in ("_tasks", "_vocabularies", "_registered"):
        monkeypatch.setattr(names, name, type(getattr(names, name))())


def test_tasks_are_registered_once_when_one_is_needed():
    calls = []
    names.declare_tasks(["first", "second"], lambda: calls.append(1))
    names.register_task("second")
    names.register_task("first")
    names.register_task("first.member")
    names.register_task("another")
    assert calls == [1]


def test_a_declared_task_and_the_members_of_a_mixture_are_known():
    names.declare_tasks(["mixture"], int)
    names.check_task("mixture")
    names.check_task("mixture.member")
    with pytest.raises(ValueError, match="No task or mixture is called 'mixtur'. Did you mean 'mixture'?"):
        names.check_task("mixtur")
    with pytest.raises(ValueError, match="must be text"):
        names.check_task(3)


@pytest.mark.parametrize("error", [Refusal("This task uses t5, which is not installed."),
                                   ModuleNotFoundError("No module named 'switch_tf.tasks.gluee'")])
def test_a_missing_package_is_refused_by_its_task_and_a_wrong_import_stays_a_bug(error):
    def register():
        raise error

    names.declare_tasks(["task"], register)
    with pytest.raises(type(error)) as raised:
        names.register_task("task")
    assert raised.value is error
