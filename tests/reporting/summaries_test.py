import io
import json

import keras
import numpy as np
import pytest

from switch_tf.checkpoints.run_folder import RunFolder
from switch_tf.metrics import Mean, Measurements, RouterStats, StepMeasurements
from switch_tf.reporting import summaries

SPEEDS = {"tokens_per_second": 30.0, "seconds_per_step": 1.0, "learning_rate": 0.01}


def _measured(config):
    stats = RouterStats(
        expert_load=Mean(np.array([5.0, 0.0, 3.0, 2.0]), 10.0), fraction_tokens_dropped=Mean(1.0, 10.0),
        router_entropy=Mean(0.0, 10.0), router_confidence=Mean(5.0, 10.0), expert_usage=Mean(0.0, 0.0),
        load_balancing_loss=Mean(15.0, 10.0), router_z_loss=Mean(20.0, 10.0))
    batch = Measurements({"cross_entropy": Mean(12.0, 4.0), "z_loss": Mean(0.4, 4.0)}, Mean(1.0, 4.0),
                         dict.fromkeys(config.sparse_layer_names, stats))
    measured = StepMeasurements(batch, tokens=Mean(30.0, 1.0), gradient_norm=Mean(4.0, 2.0), loss=Mean(6.268, 2.0))
    return keras.tree.map_structure(np.float64, measured)


def test_sums_are_divided_and_the_loss_is_what_the_steps_minimised(tiny_config):
    values = summaries.training_values(_measured(tiny_config), SPEEDS)
    assert values["train/cross_entropy"] == 3.0
    # two sparse layers, each 1.5 and 2.0
    assert values["train/load_balancing_loss"] == pytest.approx(3.0)
    assert values["train/router_z_loss"] == pytest.approx(4.0)
    assert values["train/loss"] == 3.134  # of two steps
    assert values["train/gradient_norm"] == 2.0
    assert values["train/tokens_per_second"] == 30.0


def test_routers_are_named_by_layer_and_their_dead_experts_counted(tiny_config):
    values = summaries.training_values(_measured(tiny_config), SPEEDS)
    assert values["router/encoder/layers_1/expert_load"] == [0.5, 0.0, 0.3, 0.2]
    assert values["router/encoder/layers_1/dead_experts"] == 1
    assert values["router/decoder/layers_1/router_confidence"] == 0.5
    assert values["router/decoder/layers_1/expert_usage"] == 0.0  # of nothing


def test_a_logged_line_tells_loss_drops_and_what_remains(tiny_config, capfd):
    measured = _measured(tiny_config)
    speeds = {**SPEEDS, "model_flops_utilization": 0.5, "input_wait_fraction": 0.0}
    progress = summaries.Progress(100)
    progress.log(90, summaries.training_values(measured, speeds))
    progress.close()
    assert ("step 90/100  loss 3.1340  cross-entropy 3.0000  accuracy 25.0%  learning rate 0.01  balance 3.000  "
            "dropped 10.0%  30 tokens/s  1.000 s/step  MFU 50%  input wait 0%  ETA 00:10\n") in capfd.readouterr().err


def test_a_short_line_is_printed_when_none_was_for_a_while(monkeypatch, capfd):
    now = 100.0
    monkeypatch.setattr(summaries.time, "monotonic", lambda: now)
    progress = summaries.Progress(60)
    for step, now in ((1, 100.0), (2, 105.0), (3, 116.0), (4, 120.0)):  # noqa: B007  read by `monotonic`
        progress.glance(step, 2.5)
    progress.close()
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("step")]
    assert lines == ["step 1/60  loss 2.5000", "step 3/60  loss 2.5000"]


def test_a_short_run_whose_log_period_is_longer_shows_its_loss_ten_times(tiny_config, capfd):
    measured = _measured(tiny_config)
    progress = summaries.Progress(60)
    progress.resume(20)
    progress.say("Tracing the training step ...")
    for step in range(21, 60):
        progress.glance(step, 2.5)
        if step == 40:
            progress.log(step, summaries.training_values(measured, {**SPEEDS, "input_wait_fraction": 0.0}))
    progress.close()
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("step")]
    assert [line.split("/")[0] for line in lines] == [f"step {step}" for step in (26, 32, 38, 40, 46, 52, 58)]


def test_the_bar_of_a_resumed_run_counts_its_rate_from_there():
    progress = summaries.Progress(100)
    progress._bar = summaries.tqdm(total=100, file=io.StringIO())
    progress.resume(40)
    progress.advance(10)
    assert (progress._bar.n, progress._bar.initial, progress._bar.total) == (50, 40, 100)
    progress.close()


def test_a_utilisation_above_100_per_cent_comes_with_a_word():
    assert summaries._utilization(1.0) == "100%"
    assert summaries._utilization(2.02) == "202% (more than the rate known of this machine)"


def test_lines_are_flushed_one_by_one_and_hold_no_nan(tmp_path):
    folder = RunFolder(tmp_path)
    writer = summaries.Writer(folder)
    writer.write(10, {"train/loss": 2.5, "router/x/expert_load": [0.5, float("nan")]})
    line = json.loads(folder.metrics.read_text())
    assert line == {"step": 10, "train/loss": 2.5, "router/x/expert_load": [0.5, None]}
    writer.close()
    assert any(entry.name.startswith("events.out") for entry in (tmp_path / "events" / "train").iterdir())


def test_a_log_of_thousands_of_experts_is_a_line_of_short_numbers_and_no_share_becomes_zero(tmp_path):
    load = np.random.default_rng(0).gamma(2, size=2048)
    load[0], load[1] = 1e-6, 0.0
    load = (load / load.sum()).tolist()
    folder = RunFolder(tmp_path)
    writer = summaries.Writer(folder)
    writer.write(1, {"router/x/expert_load": load})
    writer.close()
    written = json.loads(folder.metrics.read_text())["router/x/expert_load"]
    np.testing.assert_allclose(written, load, rtol=0.005)
    assert written.count(0) == 1 and folder.metrics.stat().st_size < 11 * 2048
