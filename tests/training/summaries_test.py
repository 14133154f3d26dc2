import json

import numpy as np
import pytest

from switch_tf.metrics import Mean
from switch_tf.training import summaries
from switch_tf.training.run_folder import RunFolder


def _means(tiny_config):
    means = {"cross_entropy": Mean(12.0, 4.0), "z_loss": Mean(0.4, 4.0), "accuracy": Mean(1.0, 4.0),
             "tokens": Mean(30.0, 1.0), "gradient_norm": Mean(2.0, 1.0)}
    for layer in tiny_config.sparse_layer_names:
        means[f"router/{layer}/load_balancing_loss"] = Mean(15.0, 10.0)
        means[f"router/{layer}/router_z_loss"] = Mean(20.0, 10.0)
        means[f"router/{layer}/expert_load"] = Mean(np.array([5.0, 0.0, 3.0, 2.0]), 10.0)
    return {name: Mean(np.asarray(mean.total, "float64"), np.float64(mean.weight)) for name, mean in means.items()}


def test_the_parts_of_the_loss_add_up(tiny_config):
    parts = summaries.loss_parts(tiny_config, _means(tiny_config), "train")
    # two sparse layers, each 1.5 and 2.0
    assert parts["train/load_balancing_loss"] == pytest.approx(3.0)
    assert parts["train/router_z_loss"] == pytest.approx(4.0)
    assert parts["train/loss"] == pytest.approx(3.0 + 0.1 + 0.01 * 3.0 + 0.001 * 4.0)


def test_router_values_count_dead_experts(tiny_config):
    values = summaries.router_values(_means(tiny_config))
    assert values["router/encoder/layers_1/expert_load"] == [0.5, 0.0, 0.3, 0.2]
    assert values["router/encoder/layers_1/dead_experts"] == 1


def test_pending_sums_survive_json_exactly(tiny_config):
    means = {"a": Mean(np.float64(1 / 3), np.float64(7)), "b": Mean(np.array([0.1, 0.2]), np.float64(3))}
    back = summaries.pending_from_json(json.loads(json.dumps(summaries.pending_to_json(means))))
    for name, mean in means.items():
        np.testing.assert_array_equal(back[name].total, mean.total)
        assert back[name].weight == mean.weight


def test_lines_are_flushed_one_by_one_and_hold_no_nan(tmp_path):
    folder = RunFolder(tmp_path)
    writer = summaries.Writer(folder)
    writer.write(10, {"train/loss": 2.5, "router/x/expert_load": [0.5, float("nan")]})
    line = json.loads(folder.metrics.read_text())
    assert line == {"step": 10, "train/loss": 2.5, "router/x/expert_load": [0.5, None]}
    writer.close()
    assert any(entry.name.startswith("events.out") for entry in (tmp_path / "events").iterdir())


def test_the_meter_divides_sums_once_and_starts_over(tiny_config):
    meter = summaries.Meter(flops_per_step=100.0, peak_flops=1e6, pending={})
    for _ in range(2):
        meter.add(_means(tiny_config), num_steps=1, input_wait=0.0)
    values = meter.read(tiny_config)
    assert values["train/cross_entropy"] == pytest.approx(24.0 / 8.0)
    assert values["train/gradient_norm"] == pytest.approx(2.0)
    assert values["train/tokens_per_second"] == pytest.approx(60.0 / (2 * values["train/seconds_per_step"]), rel=1e-6)
    assert meter.sums == {}
