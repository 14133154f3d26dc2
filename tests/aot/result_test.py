"""The JSON object of an answer, by hand."""

import json

import pytest

from switch_tf import SwitchConfig
from switch_tf.aot import plan, result
from switch_tf.aot.chips import Chip
from switch_tf.aot.clock import Schedule
from switch_tf.aot.roofline import Roofline
from switch_tf.aot.sent import Sent
from switch_tf.partitioning.layout import Layout
from switch_tf.training.run import StepSettings

CONFIG = SwitchConfig.from_preset("t5_base")
CHIP = Chip(memory=1000.0, flops=1e15, memory_bandwidth=1e12, link_bandwidth=1e11, clock=1e9)
QUESTION = plan.Question(CONFIG, "mixed_bfloat16", None, Layout("data=4", (("batch", "data"),)), "v5e:2x2", CHIP, 8,
                         {"inputs": 64, "targets": 32}, StepSettings())


class _Program:
    unread_loops = ()
    collectives = [Sent("all-reduce", size, 4, ("data",), "f32[1]", "encoder") for size in (*range(1, 10), 100)]


def _answer(temporaries, refused=None):
    memory = {"arguments": 500, "outputs": 400, "aliased": 300, "temporaries": temporaries, "code": 100, "weights": 200,
              "slots": 100, "gradients": 0}
    parts = {"attention": 0.4, "waiting for memory": 0.1}
    schedule = Schedule(0.2, [], {"attention": 0.2}, {"encoder/layers_0": 0.2}, {"sort": 0.01})
    return plan.Answer(memory, {"all-reduce": {"count": 10, "bytes": 145}}, 5.0, Roofline(0.3, 0.1, 0.2), parts, 900,
                       None if refused else _Program(), schedule, [(2, 2), (4, 4)], refused)


def test_a_step_that_fits():
    found = result.as_json(QUESTION, _answer(temporaries=300))
    assert set(json.loads(json.dumps(found))) == {
        "topology", "mesh", "num_parameters", "layers", "compiled_layers", "fits", "chip_bytes", "collectives",
        "advice", "bytes_per_device", "flops_per_device", "warnings", "largest_collectives", "predicted"}
    assert (found["fits"], found["advice"], found["warnings"]) == (True, [], [])
    assert found["bytes_per_device"]["needed"] == 500 + 400 - 300 + 300 + 100 == found["chip_bytes"]
    assert [one["bytes"] for one in found["largest_collectives"]] == [100, *range(9, 2, -1)]
    predicted = found["predicted"]
    assert (predicted["floor_seconds"], predicted["step_seconds"]) == pytest.approx((0.3, 0.5))
    # 8 * (64 + 32) tokens.
    assert predicted["tokens_per_second"] == pytest.approx(768 / 0.5)
    assert (predicted["layers"], predicted["seconds_by_bytes"]) == ({"encoder/layers_0": 0.2}, {"sort": 0.01})
    parts = CONFIG.flops_by_part(64, 32)
    flops = 3 * 8 * (sum(parts.values()) - parts["capacity_padding"])
    assert predicted["model_flops_utilization"] == pytest.approx(flops / 4e15 / 0.5)


def test_one_that_does_not_has_advice():
    found = result.as_json(QUESTION, _answer(temporaries=301))
    assert not found["fits"] and found["advice"] and "predicted" in found


def test_where_the_compiler_refuses_there_are_its_words_and_no_numbers():
    found = result.as_json(QUESTION, _answer(temporaries=0, refused="no room"))
    assert (found["fits"], found["refused"]) == (False, "no room")
    assert found["advice"] and not {"predicted", "bytes_per_device", "warnings"} & set(found)
