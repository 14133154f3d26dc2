"""The NumPy reader of the journeys, against logits that PyTorch computed."""

import numpy as np
import pytest

from tests.conversion import numpy_reader
from tests.conversion.shared import GOLDEN, expected_logits


@pytest.mark.parametrize("case", ["t5_1_1", "umt5", "switch", "switch_step_1", "switch_step_4"])
def test_logits_are_pytorchs(case):
    features, expected, is_real = expected_logits(case)
    logits = numpy_reader.logits_of(GOLDEN / case, *features.values())
    assert np.abs(logits - expected)[is_real].max() < 1e-5
