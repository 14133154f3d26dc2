import json

import numpy as np
import pytest
import tensorflow as tf

from switch_tf.comparison.driver import SameBatches
from switch_tf.refusals import Refusal


def batches(first_step, steps=1, change=None):
    """Of a run whose tokens are the number of the step."""
    values = np.repeat(np.arange(first_step, first_step + steps), 6).reshape(steps, 2, 3)
    if change is not None:
        values[change] += 1
    return {"decoder_target_tokens": tf.constant(values), "encoder_input_tokens": tf.constant(values + 7)}


def test_another_token_is_noticed_by_whoever_comes_second(tmp_path):
    same = SameBatches(tmp_path / "batches.jsonl")
    same.look("dense", 0, batches(0))
    same.look("sparse", 0, batches(0))
    same.look("dense", 1, batches(1))
    with pytest.raises(Refusal, match="The batch after step 1 of 'sparse' is not the one that 'dense'"):
        same.look("sparse", 1, batches(1, change=(0, 1, 2)))


def test_features_that_trade_places_are_other_batches(tmp_path):
    same = SameBatches(tmp_path / "batches.jsonl")
    given = batches(0)
    same.look("dense", 0, given)
    swapped = dict(zip(given, reversed(list(given.values())), strict=True))
    with pytest.raises(Refusal):
        same.look("sparse", 0, swapped)


def test_steps_count_alike_however_many_come_at_once(tmp_path):
    same = SameBatches(tmp_path / "batches.jsonl")
    same.look("dense", 0, batches(0, steps=4))
    same.look("sparse", 0, batches(0, steps=2))
    same.look("sparse", 2, batches(2, steps=2))
    with pytest.raises(Refusal, match="after step 3"):
        same.look("other", 2, batches(2, steps=2, change=(1, 0, 0)))


def test_what_was_written_counts_in_the_next_process_and_a_torn_line_does_not(tmp_path):
    path = tmp_path / "batches.jsonl"
    same = SameBatches(path)
    same.look("dense", 0, batches(0, steps=2))
    same.write()
    same.look("dense", 1, batches(1))  # again, after a kill
    same.write()
    assert len(path.read_text().splitlines()) == 2
    path.write_text(path.read_text() + '{"step": 2, "vari')
    again = SameBatches(path)
    again.look("dense", 2, batches(2))
    again.write()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [0, 1, 2]
    with pytest.raises(Refusal, match="after step 0 of 'dense' is not the one that 'dense' was given"):
        again.look("dense", 0, batches(0, change=(0, 0, 0)))
