"""Only downstream tasks need t5; without it they are refused in a sentence and the others work."""

import json
import sys

import pytest
import seqio

from switch_tf.cli import main
from switch_tf.configs import names, shipped_gin

DOWNSTREAM = {"anli", "arc", "closed_book_qa", "glue", "multi_task", "squad", "summarization", "super_glue",
              "translation", "winogrande"}
PARTS = "switch_tf.tasks.t5_parts"


@pytest.fixture
def _without_t5(monkeypatch):
    for name in list(sys.modules):
        if name.startswith("t5.") or name in {PARTS, "switch_tf.tasks.glue"}:
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "t5", None)
    monkeypatch.setattr(names, "_registered", set())
    for registry in (seqio.TaskRegistry, seqio.MixtureRegistry):  # without what other tests have registered
        monkeypatch.setattr(registry, "_REGISTRY", {})


def test_no_other_task_module_imports_t5():
    folder = shipped_gin.folder() / "tasks"
    modules = {path.stem: path.read_text() for path in folder.glob("*.py")}
    assert {name for name, text in modules.items() if "from t5" in text} == {"t5_parts"}
    needing = {name for name, text in modules.items() if "import t5_parts" in text or "t5_parts import" in text}
    assert needing == DOWNSTREAM - {"multi_task"}  # which imports the others


@pytest.mark.usefixtures("_without_t5")
def test_a_downstream_task_names_the_line_that_installs_t5(capsys):
    assert main.main(["tasks", "glue_cola"]) == 2
    error = capsys.readouterr().err
    assert "t5, which is not installed; run `" in error and "install --no-deps t5==0.9.4" in error
    assert "Traceback" not in error


@pytest.mark.usefixtures("_without_t5")
def test_the_other_tasks_are_listed_without_t5(capsys):
    assert main.main(["tasks", "--json"]) == 0
    output = capsys.readouterr()
    assert "Not listed: the tasks of gin/tasks/" in output.err
    assert "gin/tasks/glue.gin" in json.loads(output.out)["left_out"]
