"""Only downstream tasks need t5; without it they are refused in a sentence and the others work."""

import json
import sys

import gin
import pytest

from switch_tf.cli import main, sources, task_files
from switch_tf.configs import shipped_gin

DOWNSTREAM = {"anli", "arc", "closed_book_qa", "glue", "multi_task", "squad", "summarization", "super_glue",
              "translation", "winogrande"}
PARTS = "switch_tf.tasks.t5_parts"


@pytest.fixture
def _without_t5(monkeypatch):
    for name in list(sys.modules):
        uses_t5 = name.startswith(f"{task_files.TASKS}.") and PARTS in sources.with_imported({name}, task_files.TASKS)
        if uses_t5 or name.startswith("t5."):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "t5", None)
    yield
    gin.clear_config()


def test_no_other_task_file_imports_t5():
    needing = {file.file for file in task_files.shipped() if PARTS in file.modules}
    assert needing == {f"gin/tasks/{name}.gin" for name in DOWNSTREAM}
    for module in shipped_gin.folder().glob("tasks/*.py"):
        assert module.name == "t5_parts.py" or "from t5" not in module.read_text(), module


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
