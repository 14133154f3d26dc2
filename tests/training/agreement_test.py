"""Processes that would not train the same run are refused by the first name that differs."""

import json
import re
import types

import pytest

from switch_tf.training import processes

ENTRIES = {"SEED": 0, "training data": {"a.txt": "10 bytes, 0a", "b.txt": "12 bytes, 0b"}, "vocabulary": ["bytes"],
           "the gin configuration": ["A = 1", "B = 2"]}


def partitioner_of(*others):
    """A partitioner of this process and of others with their own entries."""

    def gather_texts(text):
        if not text.startswith("{"):
            return [text, *("" if other else text for other in others)]
        mine = json.loads(text)
        return [text, *(json.dumps({**mine, **other}) for other in others)]

    return types.SimpleNamespace(num_processes=1 + len(others), gather_texts=gather_texts)


def test_equal_processes_agree_by_their_hashes_alone():
    partitioner, sent = partitioner_of({}, {}), []
    gather = partitioner.gather_texts
    partitioner.gather_texts = lambda text: sent.append(text) or gather(text)
    processes.agree(partitioner, ENTRIES)
    assert [len(text) for text in sent] == [64]
    processes.agree(types.SimpleNamespace(num_processes=1), ENTRIES)  # exchanges nothing


@pytest.mark.parametrize(("other", "sentence"), [
    ({"SEED": 4}, "SEED is 0 and 4 in processes 0 and 2"),
    ({"training data": {"a.txt": "10 bytes, 0a", "b.txt": "12 bytes, 0c"}},
     "training data, b.txt, is '12 bytes, 0b' and '12 bytes, 0c' in"),
    ({"training data": {"a.txt": "10 bytes, 0a"}}, "training data, b.txt, is '12 bytes, 0b' and 'missing' in"),
    ({"vocabulary": ["bytes", "words"]}, "vocabulary is 'missing' and 'words' in"),
    ({"the gin configuration": ["A = 1", "B = 3"]}, "the gin configuration is 'B = 2' and 'B = 3' in"),
    ({"versions": {"switch_tf": "9"}}, r"versions, switch_tf, is '[\d.]+' and '9' in"),
    ({"more": 1}, "more is 'missing' and 1 in")])
def test_the_first_difference_is_named(other, sentence):
    with pytest.raises(ValueError, match=re.escape("All processes of a run need the same configuration, and ")
                       + sentence) as error:
        processes.agree(partitioner_of({}, other), ENTRIES)
    assert "\n" not in str(error.value)
