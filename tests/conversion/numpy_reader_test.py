"""The NumPy reader of the journeys, against logits that PyTorch computed."""

import pathlib

import numpy as np
import pytest

from tests.conversion import numpy_reader

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "hugging_face"


@pytest.mark.parametrize("case", ["t5_1_1", "umt5", "switch", "switch_step_1", "switch_step_4"])
def test_logits_are_pytorchs(case):
    expected = np.load(GOLDEN / case / "expected.npz")
    logits = numpy_reader.logits_of(GOLDEN / case, expected["inputs"], expected["decoder_inputs"])
    is_real = expected["targets"] != 0
    assert np.abs(logits - expected["logits"])[is_real].max() < 1e-5
