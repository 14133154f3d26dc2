"""A batch by hand, shared by the tests of this folder."""

import numpy as np
import pytest


def check_causal(model, one, logits):
    """A later target never changes an earlier logit, and changes its own.

    Args:
        one: features of one sequence.
        logits: those of the model for it.
    """
    for position in range(1, 6):
        changed = one["decoder_input_tokens"].copy()
        changed[:, position:] = (changed[:, position:] + 7) % 32
        again = model({**one, "decoder_input_tokens": changed}).numpy()
        np.testing.assert_allclose(again[:, :position], logits[:, :position], rtol=1e-5, atol=1e-5)
        assert np.abs(again[:, position] - logits[:, position]).max() > 1e-3


@pytest.fixture
def features():
    """3 examples: 8 inputs and 6 targets, padded to different lengths; inputs are the targets shifted right."""
    rng = np.random.RandomState(0)
    inputs, targets = rng.randint(1, 32, (3, 8)), rng.randint(1, 32, (3, 6))
    for row, (num_inputs, num_targets) in enumerate(((8, 6), (5, 4), (3, 1))):
        inputs[row, num_inputs:] = 0
        targets[row, num_targets:] = 0
    shifted = np.concatenate([np.zeros((3, 1), int), targets[:, :-1]], axis=1)
    return {"encoder_input_tokens": inputs.astype("int32"), "decoder_input_tokens": shifted.astype("int32"),
            "decoder_target_tokens": targets.astype("int32")}
