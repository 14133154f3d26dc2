import json
import shutil

import numpy as np
import pytest

from switch_tf import conversion
from switch_tf.cli import main


@pytest.mark.parametrize("method", ["most_used", pytest.param("merge", marks=pytest.mark.slow)])
def test_a_smaller_model_is_written_with_the_loss_before_and_after(method, sparse_run, tmp_path, capsys):
    words = ["shrink", "--json", f"--from={sparse_run}", "--num_experts=3", f"--output={tmp_path / 'small'}"]
    assert main.main([*words, *["--merge"] * (method == "merge")]) == 0
    shown = capsys.readouterr()
    result = json.loads(shown.out.splitlines()[-1])
    assert (result["method"], result["step"]) == (method, 7)
    assert result["num_experts"] == {"before": 8, "after": 3}
    assert all(4 < loss < 12 for loss in result["loss"].values())
    [(router, layer)] = result["layers"].items()
    assert router == "encoder/layers_0" and sum(layer["use"]) == pytest.approx(1)
    assert len(layer["groups"]) == 3
    if method == "merge":
        assert sorted(sum(layer["groups"], [])) == list(range(8))
    else:
        assert sum(layer["use"][expert] for [expert] in layer["groups"]) == pytest.approx(
            sum(sorted(layer["use"])[-3:]))
    assert "with 8 experts a layer" in shown.err and "  encoder/layers_0  " in shown.err
    small, large = conversion.from_switch_tf(tmp_path / "small"), conversion.from_switch_tf(sparse_run)
    assert small.config.num_experts == 3
    assert result["num_parameters"] == {"before": large.config.num_parameters, "after": small.config.num_parameters}
    if method == "most_used":
        kept = sum(layer["groups"], [])
        np.testing.assert_array_equal(small.encoder.layers[0].mlp.experts.wo.numpy(),
                                      large.encoder.layers[0].mlp.experts.wo.numpy()[kept])


@pytest.mark.parametrize(("words", "message"), [
    (["--from=nowhere", "--num_experts=3"], "--from must be a run folder or one of its checkpoints, because the use"),
    (["--from=weights", "--num_experts=3"], "--from must be a run folder or one of its checkpoints"),
    (["--from=run", "--num_experts=8"], "--num_experts must be below the experts of a layer of --from, 8, not 8."),
    (["--from=run/checkpoints/step_00000007", "--num_experts=0"], "--num_experts must be an integer of at least 1"),
    (["--from=run", "--num_experts=3", "--gin.BATCH_SIZ=3"], "BATCH_SIZ")])
def test_mistakes_are_one_sentence_and_write_nothing(words, message, sparse_run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(sparse_run, "run")
    shutil.copytree(sparse_run / "checkpoints" / "step_00000007", "weights")
    assert main.main(["shrink", *words, "--output=x"]) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("switch-tf shrink: ") and error.count("\n") == 1
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["run", "weights"]
