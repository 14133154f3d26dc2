import json

import numpy as np
import pytest

from switch_tf.comparison import results


def test_a_run_folder_becomes_curves(make_run):
    run = results.read(make_run("dense", [4.0, 3.0, 2.0, 1.0], seconds_per_step=0.5), "dense")
    assert run.steps.tolist() == [10, 20, 30, 40]
    assert run.losses.tolist() == [4.0, 3.5, 3.0, 2.0]  # each the mean of three, and none of step 0
    assert run.seconds.tolist() == [5.0, 10.0, 15.0, 20.0]
    assert run.tokens.tolist() == [500.0, 1000.0, 1500.0, 2000.0]
    assert run.flops.tolist() == [3 * step * 16 * run.config.flops_per_sequence(8, 4) for step in (10, 20, 30, 40)]
    assert list(run.values) == ["eval/facts/recall"]
    assert run.values["eval/facts/recall"][0] == [0, 10, 20, 30, 40]
    assert run.loss_name == "eval/facts/loss" and run.seed == 0 and run.config.num_experts == 0


def test_time_is_the_sum_of_steps_whatever_their_speed_and_is_interpolated_between_two_logs(make_run):
    folder = make_run("x", [3.0])
    lines = [{"step": 4, "train/seconds_per_step": 1.0, "train/tokens_per_second": 10.0},
             {"step": 5, "eval/facts/loss": 3.0},
             {"step": 8, "train/seconds_per_step": 3.0, "train/tokens_per_second": 20.0},
             {"step": 8, "eval/facts/loss": 2.0}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = results.read(folder, "x")
    assert run.seconds.tolist() == [4 + 3, 4 + 12]
    assert run.tokens.tolist() == [40 + 60, 40 + 240]
    assert run.step_times == {4: 1.0, 8: 3.0}


def test_smoothing_takes_as_many_as_there_are():
    np.testing.assert_allclose(results.smoothed([6.0]), [6.0])
    np.testing.assert_allclose(results.smoothed([6.0, 3.0, 0.0, 0.0]), [6.0, 4.5, 3.0, 1.0])


@pytest.mark.parametrize("history", [[], [1e6], [9.7, 3.3, 0.1], [7.1] * 40])
@pytest.mark.parametrize("window", [[0.1, 0.1, 0.1], [0.3, 0.1, 0.2], [2.0, 1.1, 1.7]])
def test_equal_losses_have_equal_means_whatever_came_before(window, history):
    mean = results.smoothed(history + window)[-1]
    assert all(results.smoothed(other + order)[-1] == mean for other in ([5.5], [0.7, 8.9]) for order in (
        window, window[::-1]))
    if len(set(window)) == 1:
        assert mean == window[0]


def test_what_is_no_trained_run_is_told(make_run, tmp_path):
    with pytest.raises(ValueError, match="is no run folder with a checkpoint"):
        results.read(tmp_path, "x")
    with pytest.raises(ValueError, match="has no held-out loss after its start"):
        results.read(make_run("short", []), "short")
    with pytest.raises(ValueError, match="diverged: its held-out loss at step 20 is no number. Leave it out"):
        results.read(make_run("diverged", [1.0, None, 1.0]), "diverged")
    with pytest.raises(ValueError, match="diverged: its held-out loss at step 10 is no number"):
        results.read(make_run("from_the_start", [None]), "from_the_start")
    folder = make_run("killed", [1.0])  # between its first evaluation and its first line about training
    metrics = folder / "metrics.jsonl"
    metrics.write_text("".join(line for line in metrics.read_text().splitlines(True) if "train/" not in line))
    with pytest.raises(ValueError, match="killed' has no logged speed .* train it to its next LOG_PERIOD"):
        results.read(folder, "killed")
    folder = make_run("old", [1.0])
    description = folder / "checkpoints" / "step_00000100" / "checkpoint.json"
    description.write_text(description.read_text().replace('"configuration"', '"another"'))
    with pytest.raises(ValueError, match="kept no record of the configuration"):
        results.read(folder, "old")


def test_runs_of_one_name_are_seeds_of_a_variant_or_called_by_their_folders(make_run):
    first = results.read(make_run("a/dense/seed_0", [1.0]), "dense")
    second = results.read(make_run("a/dense/seed_1", [1.0], seed=1), "dense")
    other = results.read(make_run("b/dense/seed_2", [1.0], seed=2, d_ff=48), "dense")
    again = results.read(make_run("c/dense/seed_0", [1.0]), "dense")
    sparse = results.read(make_run("a/sparse/seed_0", [1.0], num_experts=4), "sparse")
    assert [run.name for run in results.told_apart([first, second, sparse])] == ["dense", "dense", "sparse"]
    named = results.told_apart([first, other, sparse])
    assert [run.name for run in named] == [str(first.folder), str(other.folder), "sparse"]
    assert results.told_apart([first, again])[1].name == str(again.folder)


@pytest.mark.parametrize("changes, reason", [
    ({"BATCH_SIZE": []}, "BATCH_SIZE is missing or damaged"), ({"SEED": None}, "SEED is missing or damaged"),
    ({"optimizer": 5}, "optimizer is missing or damaged"), ({"MIXTURE_OR_TASK_NAME": {}}, "MIXTURE_OR_TASK_NAME is"),
    ({"TASK_FEATURE_LENGTHS": {"inputs": 8}}, "TASK_FEATURE_LENGTHS is missing or damaged"),
    ({"SwitchConfig.d_model": "x"}, "d_model must be an integer"),
    ({"SwitchConfig.foo": 1}, "a model with 'foo', which")])
def test_a_damaged_configuration_is_told(make_run, changes, reason):
    with pytest.raises(ValueError, match=f"The configuration in .*checkpoint.json cannot be read: .*{reason}"):
        results.read(make_run("a", [1.0], changes=changes), "a")


def test_a_line_without_one_of_its_times_is_left_out_of_the_time(make_run):
    folder = make_run("a", [3.0, 2.0])
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 20, "train/seconds_per_step": 9.0}\n')
    assert results.read(folder, "a").seconds.tolist() == [5.0, 10.0]
