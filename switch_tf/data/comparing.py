"""Targets as predictions can spell them, and how many of a task's targets no prediction can match.

A prediction is what the vocabulary makes of ids, so it has no trailing blank, no newline, and only the Unicode forms
that the vocabulary normalises to. A target as its file spells it may differ from what a perfect model can say.
"""

import numpy as np


def is_by_spelling(task) -> bool:
    """Whether the source of a task asks that targets be compared as the vocabulary spells them.

    Text files do. Benchmarks keep their references as published, so that scores can be compared with published ones.
    """
    return bool(getattr(task.source, "compares_by_spelling", False)) and task.postprocessor is None


def by_spelling(task, length: int):
    """Returns a postprocessor that gives targets as the task's vocabulary spells them, and predictions as they are.

    Args:
        task: seqio.Task.
        length: int. Tokens of targets.
    """
    vocabulary = task.output_features["targets"].vocabulary

    def postprocess(text, example=None, is_target=False, **unused):
        return _spelt(text, _ids(example, vocabulary), vocabulary, length) if is_target else text

    return postprocess


def _spelt(text, ids, vocabulary, length):
    """A target as its ids read; as it is written where they lack a part of it."""
    if _lacks_pieces(ids, vocabulary):
        return text
    if _is_cut(text, ids, vocabulary, length):
        ids = vocabulary.encode(text)
        return text if _lacks_pieces(ids, vocabulary) else vocabulary.decode(ids)
    return vocabulary.decode(ids)


def unmatched(task, examples, length: int) -> str | None:
    """Counts the targets that even a prediction of their very ids does not match.

    Args:
        task: seqio.Task.
        examples: of the task, as its evaluator keeps them.
        length: int. Tokens of targets.

    Returns:
        A sentence with the counts and the first such target, or None where every target can be matched.
    """
    vocabulary = task.output_features["targets"].vocabulary
    reasons, first, total = {}, None, 0
    for example in examples:
        total += 1
        text = example.get("targets_pretokenized")
        if not isinstance(text, bytes):
            continue
        text, ids = text.decode(errors="replace"), _ids(example, vocabulary)
        target, prediction = (task.postprocess_fn(one, example=example, is_target=is_target)
                              for one, is_target in ((text, True), (vocabulary.decode(ids), False)))
        if _is_match(target, prediction):
            continue
        reason = _reason(text, ids, vocabulary, length)
        reasons[reason] = reasons.get(reason, 0) + 1
        first = first or f"{_shown(text)} as {_shown(vocabulary.decode(ids))}"
    if not reasons:
        return None
    counts = "; ".join(f"{count} {reason}" for reason, count in reasons.items())
    return (f"{sum(reasons.values())} of {total} targets of {task.name!r} cannot be matched by any prediction, so a "
            f"perfect model scores less than full marks: {counts}. The first is {first}.")


def _shown(text):
    """A text with its blanks and newlines to be seen."""
    return repr(text if len(text) <= 80 else f"{text[:80]}...")


def _ids(example, vocabulary):
    """The ids of an example's target, without the end and what follows."""
    ids = np.asarray(example["targets"]).tolist()
    return ids[:ids.index(vocabulary.eos_id)] if vocabulary.eos_id in ids else ids


def _lacks_pieces(ids, vocabulary):
    return vocabulary.unk_id is not None and vocabulary.unk_id in ids


def _is_cut(text, ids, vocabulary, length):
    """Whether the ids are all that fits, and read as less than the whole text does."""
    if len(ids) < length - 1:
        return False
    whole = vocabulary.decode(vocabulary.encode(text))
    return len("".join(vocabulary.decode(ids).split())) < len("".join(whole.split()))


def _reason(text, ids, vocabulary, length):
    if _is_cut(text, ids, vocabulary, length):
        return f"longer than the {length} tokens of targets (TASK_FEATURE_LENGTHS)"
    if _lacks_pieces(ids, vocabulary):
        return "with characters that the vocabulary lacks"
    return "spelt otherwise by the vocabulary"


def _is_match(target, prediction):
    """Whether a prediction equals the target, or one of several targets up to case, blanks and punctuation."""
    if isinstance(target, list | tuple | set) and isinstance(prediction, str):
        return any(_squashed(one) == _squashed(prediction) for one in target)
    if isinstance(target, np.ndarray) or isinstance(prediction, np.ndarray):
        return np.array_equal(target, prediction)
    return bool(target == prediction)


def _squashed(text):
    """As the metrics of several answers compare: SQuAD's and TriviaQA's ignore case, blanks and punctuation."""
    return "".join(character for character in str(text).casefold() if character.isalnum())
