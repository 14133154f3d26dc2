import numpy as np
import pytest

from switch_tf import conversion


@pytest.mark.parametrize("method", ["most_used", pytest.param("merge", marks=pytest.mark.slow)])
def test_a_smaller_model_is_written_with_the_loss_before_and_after(method, sparse_run, tmp_path, call):
    result, shown = call(f"shrink --json --from={sparse_run} --num_experts=3 --output={tmp_path / 'small'}",
                         *["--merge"] * (method == "merge"))
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
    assert "with 8 experts a layer" in shown and "  encoder/layers_0  " in shown
    small, large = conversion.from_switch_tf(tmp_path / "small"), conversion.from_switch_tf(sparse_run)
    assert small.config.num_experts == 3
    assert result["num_parameters"] == {"before": large.config.num_parameters, "after": small.config.num_parameters}
    if method == "most_used":
        kept = sum(layer["groups"], [])
        np.testing.assert_array_equal(small.encoder.layers[0].mlp.experts.wo.numpy(),
                                      large.encoder.layers[0].mlp.experts.wo.numpy()[kept])
