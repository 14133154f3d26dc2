"""The table is the same on every machine, every key asks for one value, and what is asked was taught."""

import pytest
import seqio

from switch_tf.tasks import random_facts, vocabularies


def test_the_table_is_pinned():
    keys, values = random_facts.facts(10000)
    assert list(zip(keys, values, strict=True))[:3] == [("wcgtZ", "mpD3I"), ("Hsu0U", "o8n7T"), ("oILHi", "FzRTV")]
    assert (keys[-1], values[-1]) == ("NJwsQ", "peZme")


@pytest.mark.parametrize("count", random_facts.NUM_FACTS.values())
def test_keys_are_different_and_smaller_tables_are_the_beginning_of_larger_ones(count):
    keys, values = random_facts.facts(count)
    assert len(keys) == len(values) == len(set(keys)) == count
    assert keys[:5000] == random_facts.facts(5000)[0] and values[:5000] == random_facts.facts(5000)[1]


def test_a_key_that_is_drawn_twice_keeps_its_first_value(monkeypatch):
    monkeypatch.setattr(random_facts, "_CHARACTERS", random_facts._CHARACTERS[:3])
    keys, values = random_facts.facts.__wrapped__(243)  # all texts of five characters out of three
    assert len(set(keys)) == 243
    again = random_facts.facts.__wrapped__(100)
    assert (keys[:100], values[:100]) == again


def test_what_is_asked_was_taught():
    taught, asked = (random_facts.examples(10000, split) for split in ("train", "validation"))
    assert len(taught["inputs"]) == 10000 and len(asked["inputs"]) == random_facts.NUM_ASKED
    table = dict(zip(taught["inputs"], taught["targets"], strict=True))
    assert all(table[key] == value for key, value in zip(asked["inputs"], asked["targets"], strict=True))


def test_examples_are_five_bytes_and_an_end_and_are_scored_whole():
    task = seqio.TaskRegistry.get("random_facts_10000")
    dataset = task.get_dataset({"inputs": 6, "targets": 6}, split="validation", shuffle=False, try_in_mem_cache=False)
    example = next(dataset.as_numpy_iterator())
    assert vocabularies.byte().decode(example["inputs"].tolist()) == "wcgtZ"
    assert [len(example[name]) for name in ("inputs", "targets")] == [6, 6] and example["targets"][-1] == 1
    (accuracy,) = task.metric_fns
    assert accuracy(["abcde", "fghij"], ["abcde", "fghiX"]) == {"sequence_accuracy": 50}
