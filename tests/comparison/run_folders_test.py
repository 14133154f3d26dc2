import json

import numpy as np
import pytest

from switch_tf.comparison import results, run_folders

FALLING = np.linspace(4.0, 1.0, 31)


def some_runs(make_run):
    fast = np.concatenate([FALLING[::2], np.full(15, 1.0)])
    return [results.read(make_run(f"{name}/seed_{seed}", list(losses + 0.01 * seed), num_experts, seed), name)
            for name, losses, num_experts in (("dense", FALLING, 0), ("experts<4>", fast, 4), ("slow", FALLING + 1, 8))
            for seed in (0, 1)]


def test_files_table_and_words(make_run, tmp_path):
    found = run_folders.write(tmp_path / "out", some_runs(make_run))
    assert json.loads((tmp_path / "out" / "comparison.json").read_text()) == found
    assert (tmp_path / "out" / "comparison.png").read_bytes().startswith(b"\x89PNG")
    header, dense, sparse, slow = run_folders.table(found).splitlines()
    assert header.split()[0] == "variant" and dense.split()[0] == "dense"
    assert sparse.split()[-2:] == ["1.82x", "1.82x"] and slow.split()[-2:] == ["never", "never"]
    assert len({len(line) for line in (header, dense, sparse, slow)}) == 1
    said = "\n".join(run_folders.words(found))
    assert "the last loss of dense (mean of the last 3 evaluations); evaluated every 10 steps" in said
    assert "experts<4> gets there 1.82 times sooner in steps and 1.82 times in time (the median of 2 seeds" in said
    assert "slow does not get there: it ends at 2.1" in said
    assert ("slow ends 1.0000 above dense (+1.0000, +1.0000 by seed), which is more than chance may do (p < 0.001): "
            "what 2 seeds can tell here with 95 % certainty, by Holm's method for 2 variants, is 0.0000.") in said


def test_what_chance_may_do_is_not_taken_for_a_difference(make_run, tmp_path):
    runs = [results.read(make_run(f"{name}/seed_{seed}", list(FALLING + loss), experts, seed), name)
            for seed, more in enumerate((0.3, -0.2, -0.3))
            for name, loss, experts in (("dense", 0, 0), ("sparse", more, 4))]
    said = "\n".join(run_folders.words(run_folders.write(tmp_path / "three", runs)))
    assert ("sparse ends 0.0667 below dense (+0.3000, -0.2000, -0.3000 by seed), which is no more than chance may do "
            "(p = 0.75): what 3 seeds can tell here with 95 % certainty is 0.7985.") in said
    said = "\n".join(run_folders.words(run_folders.write(tmp_path / "one", runs[:2])))
    assert "sparse ends 0.3000 above dense; one seed does not say how much of that is chance." in said
    said = "\n".join(run_folders.words(run_folders.write(tmp_path / "unpaired", [runs[0], *runs[1::2]])))
    assert ("sparse ends 0.0667 below dense; seeds that dense was not trained with do not say how much of that is "
            "chance.") in said


def test_the_page_needs_no_other_file_and_names_are_text(make_run, tmp_path):
    run_folders.write(tmp_path, some_runs(make_run))
    page = (tmp_path / "comparison.html").read_text()
    assert "data:image/png;base64," in page and "http" not in page
    assert "experts&lt;4&gt;" in page and "experts<4>" not in page
    assert page.count("never, never") == 2  # to the two lower of four losses


def test_what_is_not_equal_is_told(make_run, tmp_path):
    runs = [results.read(make_run(name, list(FALLING), changes=changes), name)
            for name, changes in (("a", {}), ("b", {"BATCH_SIZE": 8}))]
    assert "Not equal: BATCH_SIZE is 16 in a and 8 in b." in run_folders.words(run_folders.write(tmp_path, runs))


def test_a_variant_that_is_slower_is_later_and_never_so_many_times_sooner(make_run, tmp_path):
    """Three evaluations at 1.0 are the target: the dense run has them at step 180, the others at step 330."""
    fast, slow = np.concatenate([FALLING[::2], np.full(17, 1.0)]), np.concatenate([FALLING, [1.0, 1.0]])
    runs = [results.read(make_run(name, list(losses), experts, seconds_per_step=seconds), name)
            for name, losses, experts, seconds in (("dense", fast, 0, 1.0), ("late", slow, 4, 1.0),
                                                   ("cheap", slow, 8, 0.25))]
    found = run_folders.write(tmp_path / "out", runs)
    late = found["variants"][1]["speedup_steps"]
    assert late == pytest.approx(180 / 330)
    said = "\n".join(run_folders.words(found))
    assert f"late gets there {1 / late:.2f} times later in steps and {1 / late:.2f} times in time." in said
    assert f"cheap gets there {1 / late:.2f} times later in steps and {4 * late:.2f} times sooner in time." in said
    assert f"{1 / late:.2f}x later" in run_folders.table(found)
    page = (tmp_path / "out" / "comparison.html").read_text()
    assert "times sooner" not in page.replace(f"{4 * late:.2f} times sooner", "")
    assert f"{1 / late:.2f}x later" in page and f"{late:.2f}x" not in page
    assert [run_folders.times(value) for value in (1.0, 0.5, None)] == ["1.00x", "2.00x later", "never"]


def test_the_page_says_who_does_other_work(make_run, tmp_path):
    runs = [results.read(make_run(name, list(FALLING), d_ff=d_ff), name)
            for name, d_ff in (("dense", 32), ("wide", 40), ("same", 32))]
    found = run_folders.write(tmp_path / "out", runs)
    page = (tmp_path / "out" / "comparison.html").read_text()
    assert "All variants do the same work" not in page and "wide does 10.0% more than dense" in page
    assert [variant["work_over_baseline"] for variant in found["variants"]] == [0, pytest.approx(0.1), 0]
    run_folders.write(tmp_path / "same", [runs[0], runs[2]])
    assert "All variants do the same work for a token" in (tmp_path / "same" / "comparison.html").read_text()


def test_axes_of_speed_ups_have_no_number_below_one():
    assert [run_folders.times(value, ".3g") for value in (0.5, 0.75, 1.0, 2.5, 0.0, -1.0)] == [
        "2x later", "1.33x later", "1x", "2.5x", "never", ""]
