"""The steps that the profiler records: those that were asked for, on each of the two kinds of back ends."""

import contextlib
import pathlib

import jax
import numpy as np
import pytest
import tensorflow as tf

from switch_tf.configs.run import Run, StepSettings, check_periods
from switch_tf.refusals import Refusal
from switch_tf.training.speed import Profiling


def recorded(folder):
    """Returns the numbers of the steps in the profile of a folder."""
    (file,) = pathlib.Path(folder).glob("profile/plugins/profile/*/*.xplane.pb")
    return [int(dict(event.stats)["step_num"]) for plane in jax.profiler.ProfileData.from_file(str(file)).planes
            for line in plane.lines for event in line.events if event.name == "train"]


@pytest.mark.parametrize("backend", ["auto", "pjrt"])
def test_a_back_end_records_the_steps_that_were_asked_for(make_partitioner, tmp_path, backend):
    partitioner, said = make_partitioner("single", backend=backend), []
    program = partitioner.compile(lambda features: tf.reduce_sum(features["inputs"]))
    profiling = Profiling(2, tmp_path, partitioner, said.append)
    for number in range(100, 106):
        with profiling.step(number):
            assert int(program(partitioner.place({"inputs": np.ones([1, 2, 4], np.int32)}))) == 8
        if number == 103:
            assert recorded(tmp_path) == [102, 103]  # it is written as soon as the steps are done
    profiling.close()
    assert recorded(tmp_path) == [102, 103]
    assert said == [f"The profile of 2 calls of the step is in {tmp_path}/profile; `pip install xprof` and "
                    f"`tensorboard --logdir {tmp_path}/profile` show it."]


class _Partitioner:
    """A partitioner that counts its recordings."""

    def __init__(self):
        self.said = []

    @contextlib.contextmanager
    def profile(self, folder):
        self.said.append("start")
        yield lambda number: contextlib.nullcontext(self.said.append(number))
        self.said.append("end")


@pytest.mark.parametrize("num_calls, num_taken, expected, said", [
    (0, 4, [], None), (2, 1, [], "The run ended before call 3"),
    (3, 4, ["start", 2, 3, "end"], "The profile of 2 calls"),
    (1, 4, ["start", 2, "end"], "The profile of 1 call of")])
def test_a_run_that_ends_early_keeps_what_was_recorded(tmp_path, num_calls, num_taken, expected, said):
    partitioner, lines = _Partitioner(), []
    profiling = Profiling(num_calls, tmp_path, partitioner, lines.append)
    for number in range(num_taken):
        assert profiling.is_recording == (number in expected)
        with profiling.step(number):
            pass
    profiling.close()
    profiling.close()
    assert partitioner.said == expected
    assert [line[:len(said)] for line in lines] == [said] if said else not lines


def test_a_step_that_fails_is_the_last_one_recorded(tmp_path):
    partitioner, lines = _Partitioner(), []
    profiling = Profiling(2, tmp_path, partitioner, lines.append)
    with pytest.raises(ZeroDivisionError):
        for number in range(3):
            with profiling.step(number):
                assert number < 2 or 1 / 0
    profiling.close()
    assert partitioner.said == ["start", 2, "end"]


def test_profile_steps_must_be_whole_calls():
    run = Run("runs/x", "task", {"inputs": 8, "targets": 8}, 4, 2, profile_steps=3, log_period=2)
    with pytest.raises(Refusal, match=r"PROFILE_STEPS must be a multiple of steps_per_call \(2\).*it is 3"):
        check_periods(run, StepSettings(steps_per_call=2))
    with pytest.raises(Refusal, match="PROFILE_STEPS"):
        Run("runs/x", "task", {"inputs": 8, "targets": 8}, 4, 2, profile_steps=-1)
