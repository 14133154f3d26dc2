"""Closed-book recall of a table of random facts: nothing can be inferred, all of it has to be remembered.

`random_facts_10000`, for example, has 10,000 facts: a key of five random letters and digits in, a value of five out, as
text of bytes (359 ids). A value holds 30 bits, so what a model can recall is a matter of how many parameters it has, as
of facts about the world in closed-book question answering (section 4.2 of the paper, TriviaQA), and not of the work
that it does for a token. Nothing is held out: the validation split is the first 4,096 of the facts.

Importing registers the tasks and makes no fact.
"""

import functools

import numpy as np
import seqio

from switch_tf.tasks import in_memory, metrics, preprocessors, text_to_text, vocabularies

NUM_FACTS = {
    "random_facts_5000": 5000,
    "random_facts_10000": 10000,
    "random_facts_20000": 20000,
    "random_facts_40000": 40000,
    "random_facts_80000": 80000,
}
NUM_ASKED = 4096
LENGTH = 5  # characters of a key, and of a value
_CHARACTERS = np.frombuffer(b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz", "S1")
_SEED = 7


@functools.cache
def facts(count: int) -> tuple[list[str], list[str]]:
    """Returns keys, all different, and their values: the first `count` of one table, the same on every machine."""
    random = np.random.Generator(np.random.PCG64(_SEED))
    drawn = random.integers(0, len(_CHARACTERS), size=(2 * max(NUM_FACTS.values()), 2 * LENGTH))
    texts = [b"".join(row).decode() for row in _CHARACTERS[drawn].tolist()]
    values = {text[:LENGTH]: text[LENGTH:] for text in reversed(texts)}  # of equal keys the first one counts
    keys = list(dict.fromkeys(text[:LENGTH] for text in texts))[:count]
    return keys, [values[key] for key in keys]


def examples(count: int, split: str) -> dict[str, list[str]]:
    """Returns inputs and targets of a split of a task."""
    keys, values = facts(count)
    end = count if split == "train" else NUM_ASKED
    return {"inputs": keys[:end], "targets": values[:end]}


for _name, _count in NUM_FACTS.items():
    seqio.TaskRegistry.add(
        _name,
        source=in_memory.InMemorySource(
            f"{_count} random facts",
            functools.partial(examples, _count),
            {"train": _count, "validation": NUM_ASKED},
            f"seed {_SEED}, {LENGTH} characters",
        ),
        preprocessors=text_to_text.tokens(),
        metric_fns=[metrics.sequence_accuracy],
        output_features=preprocessors.output_features(vocabularies.byte()),
    )
