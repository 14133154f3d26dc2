"""`upcycle` and `average` write portions, and after a kill the same command goes on to the same bytes."""

import dataclasses

import pytest
import tensorflow as tf

from switch_tf import SwitchTransformer, data
from switch_tf.checkpoints import bundles, continuation, tensors
from switch_tf.checkpoints.checkpointer import Checkpointer
from switch_tf.cli import main
from switch_tf.conversion import model_gin, weight_source
from tests.conversion.streaming_test import sums


class Killed(BaseException):
    """Ends a command as Ctrl-C does."""


@pytest.fixture
def commands(shallow_config, tmp_path):
    """Name -> words of a command without its output."""
    config = dataclasses.replace(shallow_config, expert_dropout_rate=0.0)
    dense = SwitchTransformer(dataclasses.replace(config, num_experts=0))
    dense.build()
    checkpointer = Checkpointer(tmp_path / "run" / "checkpoints", tensors.state_variables(dense),
                                data.Batches({None: iter(tf.data.Dataset.range(9))}, batch_size=1), keep=2,
                                configuration=continuation.record_of(dense.config))
    for step in (1, 2):
        checkpointer.save(step, {})
        checkpointer.wait()
        for variable in dense.variables:
            variable.assign(variable.numpy() + 1)
    checkpointer.close()
    (tmp_path / "sparse.gin").write_text(model_gin.gin_text(config))
    return {"average": ["average", f"--run={tmp_path / 'run'}", "--last=2"],
            "upcycle": ["upcycle", f"--from={tmp_path / 'run'}", f"--gin_file={tmp_path / 'sparse.gin'}",
                        "--noise=0.1", "--reinitialize=0.5"]}


@pytest.mark.parametrize(("command", "named"), [("average", None), ("upcycle", "noise")])
def test_a_killed_command_goes_on_to_the_same_bytes(command, named, commands, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(weight_source, "LARGEST", 8_000)
    output = tmp_path / "out"
    words = [*commands[command], f"--output={output}"]
    write, calls = bundles.write, []

    def killing(*arguments):
        calls.append(arguments)
        if len(calls) == 5:
            raise Killed
        return write(*arguments)

    monkeypatch.setattr(bundles, "write", killing)
    with pytest.raises(Killed):
        main.main(words)
    assert not output.exists()
    if named:
        assert main.main([*words, f"--{named}=0.2"]) == 2
        assert f"unfinished work on another {named}; give the command that began it" in capsys.readouterr().err
    calls.clear()
    monkeypatch.setattr(bundles, "write", lambda *arguments: (calls.append(arguments), write(*arguments))[1])
    assert main.main(words) == 0
    rest = len(calls)
    went_on = sums(output)
    assert main.main([*commands[command], f"--output={tmp_path / 'whole'}"]) == 0
    assert len(calls) - rest == rest + 4  # the four portions before the kill were kept
    assert sums(tmp_path / "whole") == went_on
