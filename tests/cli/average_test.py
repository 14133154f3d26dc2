import json

import numpy as np
import pytest
import tensorflow as tf

from switch_tf import SwitchTransformer, conversion, data
from switch_tf.checkpoints import continuation, tensors
from switch_tf.checkpoints.checkpointer import Checkpointer
from switch_tf.cli import main


@pytest.fixture(scope="module")
def folder(shallow_config, tmp_path_factory):
    """A folder with a run, whose checkpoints have 1 and 2 as the values of all weights."""
    path = tmp_path_factory.mktemp("runs")
    model = SwitchTransformer(shallow_config)
    model.build()
    batches = data.Batches({None: iter(tf.data.Dataset.range(9))}, batch_size=1)
    checkpointer = Checkpointer(path / "run" / "checkpoints", tensors.state_variables(model), batches, keep=2,
                                configuration=continuation.record_of(shallow_config))
    for step in (1, 2):
        for variable in model.variables:
            variable.assign(np.full(variable.shape, step))
        checkpointer.save(step, {})
        checkpointer.wait()
    checkpointer.close()
    (path / "empty").mkdir()
    return path


def test_the_mean_is_written_with_its_steps(folder, tmp_path, capsys):
    assert main.main(["average", "--json", f"--run={folder / 'run'}", "--last=2", f"--output={tmp_path / 'mean'}"]) == 0
    shown = capsys.readouterr()
    result = json.loads(shown.out)
    model = conversion.from_switch_tf(tmp_path / "mean")
    assert (result["steps"], result["num_parameters"]) == ([1, 2], model.config.num_parameters)
    assert result["vocabulary"] is None and "Without a vocabulary: " in shown.err
    assert all((variable.numpy() == 1.5).all() for variable in model.variables)


@pytest.mark.parametrize(("words", "message"), [
    (["--run=run", "--last=1", "--output=x"], "--last must be an integer of at least 2, not 1."),
    (["--run=run", "--last=3", "--output=x"], "--last must be at most 2, the number of checkpoints in 'run', not 3"),
    (["--run=empty", "--last=3", "--output=x"], "--run must name a run folder, which holds checkpoints; 'empty' does"),
    (["--run=run", "--last=2", "--output=run"], "run must be new or an empty folder")])
def test_mistakes_are_one_sentence_and_write_nothing(words, message, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    assert main.main(["average", *words]) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("switch-tf average: ") and error.count("\n") == 1
    assert sorted(entry.name for entry in folder.iterdir()) == ["empty", "run"]
