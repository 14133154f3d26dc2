"""The JSON object of an answer, by hand."""

import json

import pytest

from tests.aot.made_up import CONFIG, answer


def test_a_step_that_fits():
    found = answer(temporaries=300)
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
    found = answer(temporaries=301)
    assert not found["fits"] and found["advice"] and "predicted" in found


def test_where_the_compiler_refuses_there_are_its_words_and_no_numbers():
    found = answer(temporaries=0, refused="no room")
    assert (found["fits"], found["refused"]) == (False, "no room")
    assert found["advice"] and not {"predicted", "bytes_per_device", "warnings"} & set(found)
