"""A description of a dataset refuses what no task could be read with."""

import pytest

from switch_tf.data import DatasetDescription

LENGTHS = {"inputs": 4, "targets": 4}


def test_the_train_split_is_read_again_and_again_and_no_other():
    assert DatasetDescription("task", LENGTHS, 2).is_training
    assert not DatasetDescription("task", LENGTHS, 2, split="validation").is_training


def test_descriptions_of_the_same_batches_are_equal():
    assert DatasetDescription("task", LENGTHS, 2) == DatasetDescription("task", dict(LENGTHS), 2, seed=0)
    assert DatasetDescription("task", LENGTHS, 2) != DatasetDescription("task", LENGTHS, 2, seed=1)


@pytest.mark.parametrize("options, message", [
    ({"task_feature_lengths": {"inputs": 4}}, r"must give the tokens of \"inputs\" and .* not \{'inputs': 4\}"),
    ({"task_feature_lengths": 128}, "must give the tokens of .* not 128"),
    ({"task_feature_lengths": {"inputs": 4, "targets": 0}}, r"\['targets'\] must be an integer of at least 1, not 0"),
    ({"task_feature_lengths": {"inputs": 4, "targets": True}}, r"\['targets'\] must be an integer.*not True"),
    ({"batch_size": 0}, "BATCH_SIZE must be an integer of at least 1, not 0"),
    ({"seed": -1}, "SEED must be an integer of at least 0, not -1"),
    ({"pack": "no"}, "pack must be True or False, not 'no'"),
    ({"task_feature_lengths": {"inputs": 4, "targets": 3}, "encoder_only": True}, "set targets to 4"),
])
def test_impossible_requests_are_refused(options, message):
    arguments = {"mixture_or_task_name": "task", "task_feature_lengths": LENGTHS, "batch_size": 2} | options
    with pytest.raises(ValueError, match=message):
        DatasetDescription(**arguments)
