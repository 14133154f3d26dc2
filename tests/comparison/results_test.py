"""Speed-ups of curves whose crossing points are known."""

import json

import numpy as np
import pytest
from scipy import stats

from switch_tf.comparison import results, run_folders

FALLING = np.linspace(4.0, 1.0, 31)  # 4.0 at step 10, 0.1 lower at each evaluation


@pytest.fixture
def read(make_run):
    return lambda name, losses, **options: results.read(make_run(name, list(losses), **options), name.split("/")[0])


def test_twice_as_steep_is_twice_as_soon(read):
    dense = read("dense", FALLING, seconds_per_step=0.5)
    sparse = read("sparse", np.concatenate([FALLING[::2], np.full(15, 1.0)]), num_experts=4, seconds_per_step=0.8)
    found = results.compare([dense, sparse])
    assert found["baseline"] == "dense" and found["not_equal"] == []
    # The means of the last three: 1.1 for dense, at step 310. Of sparse 1.2, 1.0, 1.0 at step 170 is the first below.
    assert found["target_loss"] == pytest.approx(1.1)
    one, two = found["variants"]
    assert (one["speedup_steps"], one["speedup_time"], one["step_time_over_dense"]) == (1, 1, 1)
    assert two["speedup_steps"] == pytest.approx(310 / 170)
    assert two["speedup_time"] == pytest.approx(310 * 0.5 / (170 * 0.8))
    assert two["step_time_over_dense"] == pytest.approx(1.6)
    assert two["final_loss"] == pytest.approx(1.0) and two["num_experts"] == 4
    assert two["seeds"][0]["curves"]["loss"][0] == 4.0
    assert found["evaluation_period"] == 10


def test_runs_that_end_at_other_steps_are_told(read):
    dense = [read(f"dense/seed_{seed}", FALLING, seed=seed) for seed in range(2)]
    sparse = [read("sparse/seed_0", FALLING, num_experts=4),
              read("sparse/seed_1", FALLING[:20], num_experts=4, seed=1)]
    assert results.compare(dense + sparse)["not_equal"] == [
        "dense was last evaluated at step 310 and sparse, seed 1, at step 200."]


def test_a_run_that_does_not_get_there_has_no_speed_up(read):
    found = results.compare([read("dense", FALLING), read("sparse", FALLING + 1, num_experts=4)])
    assert found["variants"][1]["speedup_steps"] is None and found["variants"][1]["speedup_time"] is None
    early = found["variants"][1]["targets"][1]
    assert early["share_of_baseline"] == 0.5 and 0.5 < early["speedup_steps"] < 1


def test_the_baseline_got_there_when_it_first_did(read):
    """Of a run that ends where it was before, waiting for its end would flatter all others."""
    dense = read("dense", [3.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0])
    sparse = read("sparse", [3.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0], num_experts=4)
    assert results.compare([dense, sparse])["variants"][1]["speedup_steps"] == 1


def test_a_run_that_ends_level_with_the_baseline_gets_there(read):
    """Histories differ and the last three losses do not: rounding must not decide."""
    dense = read("dense", [3.3, 1.1, 0.7, 0.7, 0.7])
    sparse = read("sparse", [9.9, 8.3, 0.7, 0.7, 0.7], num_experts=4)
    found = results.compare([dense, sparse])["variants"][1]
    assert (found["loss_over_baseline"], found["speedup_steps"]) == (0, 1)


def test_seeds_are_compared_with_their_own_and_the_median_is_told(read):
    dense = [read(f"dense/seed_{seed}", FALLING + 0.2 * seed, seed=seed) for seed in range(3)]
    fast = np.concatenate([FALLING[::2], np.full(15, 1.0)])
    sparse = [read(f"sparse/seed_{seed}", losses, seed=seed, num_experts=4)
              for seed, losses in enumerate([fast, FALLING + 9, FALLING + 0.4])]
    variant = results.compare(dense + sparse)["variants"][1]
    assert [seed["speedup_steps"] for seed in variant["seeds"]] == [pytest.approx(310 / 170), None, 1]
    assert variant["speedup_steps"] == 1


def test_a_difference_is_told_beside_the_smallest_that_its_seeds_could_tell(read):
    dense = [read(f"dense/seed_{seed}", FALLING + seed, seed=seed) for seed in range(3)]
    sparse = [read(f"sparse/seed_{seed}", FALLING + seed - gain, seed=seed, num_experts=4)
              for seed, gain in enumerate([0.1, 0.2, 0.3])]
    one, two = results.compare(dense + sparse)["variants"]
    assert (one["loss_over_baseline"], one["smallest_effect"], one["p_value"]) == (0, None, None)
    # Of two degrees of freedom t is 4.303; the standard error of 0.1, 0.2, 0.3 is 0.1 over the root of 3.
    assert two["loss_over_baseline"] == pytest.approx(-0.2)
    assert two["smallest_effect"] == pytest.approx(4.3027 * 0.1 / 3**0.5, rel=1e-4)
    # t = 0.2 / (0.1 / sqrt(3)) = 3.4641 has a two-sided p of 1 - 3.4641 / sqrt(2 + 12) = 0.0742 for two degrees.
    assert two["p_value"] == pytest.approx(0.07418, rel=1e-3)
    assert [seed["loss_over_baseline"] for seed in two["seeds"]] == pytest.approx([-0.1, -0.2, -0.3])
    assert results.compare([dense[0], sparse[0]])["variants"][1]["smallest_effect"] is None


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (2, 1)])
def test_seeds_are_paired_by_their_number_whatever_their_order_and_count(read, order):
    dense = [read(f"dense/seed_{seed}", FALLING + seed, seed=seed) for seed in range(3)]
    sparse = [read(f"sparse/seed_{seed}", FALLING + seed - (0.1, 0.2, 0.3)[seed], seed=seed, num_experts=4)
              for seed in order]
    variant = results.compare(dense + sparse)["variants"][1]
    gains = [(0.1, 0.2, 0.3)[seed] for seed in order]
    assert [seed["loss_over_baseline"] for seed in variant["seeds"]] == pytest.approx([-gain for gain in gains])
    assert variant["loss_over_baseline"] == pytest.approx(-np.mean(gains))
    # Student's t of two degrees of freedom and of one, times the standard error of the mean of 3 and of 2 differences.
    expected = {3: 4.3027 * 0.1 / 3**0.5, 2: 12.7062 * 0.1 / 2**0.5 / 2**0.5}[len(order)]
    assert variant["smallest_effect"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("seeds", [(0, 1, 2), (1, 2), (0, 3)])
def test_seeds_that_the_baseline_lacks_do_not_say_what_chance_may_do(read, seeds):
    """Differences from one run of the baseline, used twice, would hide what that one owes to chance."""
    dense = [read("dense/seed_0", FALLING)]
    sparse = [read(f"sparse/seed_{seed}", FALLING + 0.1 * seed, seed=seed, num_experts=4) for seed in seeds]
    variant = results.compare(dense + sparse)["variants"][1]
    assert variant["smallest_effect"] is None and len(variant["seeds"]) == len(seeds)


def test_several_variants_are_tested_by_holms_method(read):
    dense = [read(f"dense/seed_{seed}", FALLING + seed, seed=seed) for seed in range(3)]
    gains = {"best": (0.10, 0.101, 0.102), "middle": (0.1, 0.11, 0.12), "equal": (0.1, 0.0, -0.1), "none": (0, 0, 0)}
    runs = [read(f"{name}/seed_{seed}", FALLING + seed - gain, seed=seed, num_experts=4)
            for name, by_seed in gains.items() for seed, gain in enumerate(by_seed)]
    found = {variant["name"]: variant for variant in results.compare(dense + runs)["variants"]}
    alone = {name: stats.ttest_1samp(by_seed, 0).pvalue for name, by_seed in gains.items() if name != "none"}
    assert found["best"]["p_value"] == pytest.approx(4 * alone["best"], rel=1e-3)
    assert found["middle"]["p_value"] == pytest.approx(3 * alone["middle"], rel=1e-3)
    assert found["equal"]["p_value"] == found["none"]["p_value"] == 1
    # At 5 % / 3 for the second one of four.
    expected = stats.t.ppf(1 - 0.025 / 3, 2) * np.std(gains["middle"], ddof=1) / 3**0.5
    assert found["middle"]["smallest_effect"] == pytest.approx(expected, rel=1e-3)
    said = "\n".join(run_folders.words(results.compare(dense + runs)))
    assert "with 95 % certainty, by Holm's method for 4 variants, is" in said
    assert said.count("is more than chance may do") == 2


def test_a_loss_is_the_mean_of_the_evaluations_that_there_are(read):
    few = [read("dense", [3.0, 2.0]), read("sparse", [3.0, 2.0], num_experts=4)]
    assert results.compare(few)["smoothing"] == "mean of the last 2 evaluations"
    assert results.compare([*few, read("long", FALLING)])["smoothing"] == "mean of the last 2 or 3 evaluations"
    assert results.compare([read("a", [3.0]), read("b", [2.0])])["smoothing"] == "one evaluation"


def test_most_seeds_have_to_get_there(read):
    dense = [read(f"dense/seed_{seed}", FALLING, seed=seed) for seed in range(2)]
    sparse = [read(f"sparse/seed_{seed}", FALLING + 9 * seed, seed=seed, num_experts=4) for seed in range(2)]
    assert results.compare(dense + sparse)["variants"][1]["speedup_steps"] is None


def test_step_times_are_compared_in_pairs(make_run):
    """A machine that was slow for half of the time is no part of the ratio."""
    runs = []
    for name, factor, experts in (("dense", 1.0, 0), ("sparse", 1.1, 4)):
        folder = make_run(name, FALLING, num_experts=experts)
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        changed = [line.replace('"train/seconds_per_step": 0.5', f'"train/seconds_per_step": {factor * slow}')
                   for line, slow in zip(lines, [1.0] * 30 + [5.0] * 33, strict=True)]
        (folder / "metrics.jsonl").write_text("\n".join(changed) + "\n")
        runs.append(results.read(folder, name))
    one, two = results.compare(runs)["variants"]
    assert two["step_time_over_dense"] == pytest.approx(1.1)
    assert two["seconds_per_step"] == pytest.approx(1.1 * one["seconds_per_step"])


def test_losses_of_other_data_are_refused(read):
    with pytest.raises(ValueError, match="not of the same tokens"):
        results.compare([read("a", FALLING), read("b", FALLING, changes={"held-out data": {"facts": "other"}})])


def test_tasks_of_a_mixture_are_compared_by_their_own_losses(make_run):
    """One task is learnt twice as soon, the other one never as well."""
    runs = []
    for name, experts, losses in (("dense", 0, (FALLING, FALLING)),
                                  ("sparse", 4, (np.concatenate([FALLING[::2], np.full(15, 1.0)]), FALLING + 1))):
        folder = make_run(name, FALLING, num_experts=experts)
        with open(folder / "metrics.jsonl", "a") as lines:
            for number, (one, two) in enumerate(zip(*losses, strict=True), 1):
                lines.write(json.dumps({"step": 10 * number, "eval/one/loss": one, "eval/two/loss": two}) + "\n")
        runs.append(results.read(folder, name))
    tasks = results.compare(runs)["variants"][1]["tasks"]
    assert list(tasks) == ["one", "two"]
    assert tasks["one"]["speedup_steps"] == pytest.approx(310 / 170) and tasks["one"]["final_loss"] == 1.0
    assert tasks["two"]["speedup_steps"] is None and tasks["two"]["final_loss"] == pytest.approx(2.1)


def _distilled(make_run, ends, students_teacher="teacher"):
    """Returns the results of a dense model, a teacher and a student with constant losses, and their sentences."""
    runs = []
    for seed in range(len(ends)):
        teacher = make_run(f"teacher/seed_{seed}", [ends[seed][1]] * 3, num_experts=4, seed=seed, files=f"{seed}")
        identity = results.read(teacher, "teacher").checkpoint
        known = {"objective": "Distillation", "Distillation.teacher": identity if students_teacher else "step 1, 0"}
        for name, loss, changes in (("dense", ends[seed][0], {}), ("student", ends[seed][2], known)):
            runs.append(results.read(make_run(f"{name}/seed_{seed}", [loss] * 3, seed=seed, changes=changes), name))
        runs.append(results.read(teacher, "teacher"))
    outcome = results.compare(results.told_apart(runs))
    return {variant["name"]: variant["distilled"] for variant in outcome["variants"]}, run_folders.words(outcome)


def test_a_student_keeps_a_share_of_the_gain_of_its_teacher(make_run):
    found, words = _distilled(make_run, [(2.0, 1.0, 1.7), (2.0, 1.5, 1.8)])
    assert found["dense"] is None and found["teacher"] is None
    student = found["student"]
    assert student["teacher"] == "teacher" and student["share"] == pytest.approx(0.25 / 0.75)
    assert student["shares"] == pytest.approx([0.3, 0.4]) and 0 < student["compression"] < 1
    assert any("student keeps 33% of the gain of teacher over dense (30%, 40% by seed) with" in line for line in words)


def test_a_teacher_without_a_gain_has_none_to_keep(make_run):
    found, words = _distilled(make_run, [(1.0, 1.5, 0.9)])
    assert found["student"]["share"] is None
    assert any("teacher is no better than dense, so there is no gain that student" in line for line in words)


def test_a_student_that_is_worse_than_the_baseline_keeps_nothing(make_run):
    found, words = _distilled(make_run, [(2.0, 1.0, 2.5)])
    assert found["student"]["share"] == pytest.approx(-0.5)
    assert any("student keeps nothing of the gain of teacher over dense with" in line for line in words)


def test_a_student_of_another_teacher_is_compared_without_it(make_run):
    assert _distilled(make_run, [(2.0, 1.0, 1.7)], students_teacher=None)[0]["student"] is None
