"""A batch by hand and kinds of models, shared by the tests of this folder."""

import numpy as np
import pytest

# One sparse layer a stack: what takes time, above all to trace, is the number of layers.
SHALLOW = {"num_encoder_layers": 1, "num_decoder_layers": 1, "encoder_sparse_step": 1, "decoder_sparse_step": 1}
ENOUGH = {"train_capacity_factor": 4.0, "eval_capacity_factor": 4.0}
BOTH = {"expert_sublayers": "feed_forward_and_attention"}


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
