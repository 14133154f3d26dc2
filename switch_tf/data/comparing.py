"""Targets in the spelling of predictions, and a count of the targets that no prediction can match.

A prediction is decoded from ids, so it has no trailing blank, no newline, and only the Unicode forms that the
vocabulary normalises to. A target in the spelling of its file may differ from the output of a perfect model.
"""

import string
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import seqio

_IGNORED = string.punctuation + "‘’´`"  # not the sign of an unknown piece


def is_by_spelling(task: "seqio.Task") -> bool:
    """Returns whether a task compares its targets in the spelling of the vocabulary, as text files do.

    Benchmarks keep their references as published, so that scores can be compared with published ones.
    """
    return bool(getattr(task.source, "compares_by_spelling", False)) and task.postprocessor is None


def by_spelling(task: "seqio.Task", length: int) -> Callable[..., Any]:
    """Returns a postprocessor that spells targets as the task's vocabulary does, and leaves predictions unchanged.

    Args:
        task: seqio.Task.
        length: int. Tokens of targets.
    """
    vocabulary = task.output_features["targets"].vocabulary

    def postprocess(text, example=None, is_target=False, **unused):
        return _spelt(text, _ids(example, vocabulary), vocabulary, length) if is_target else text

    return postprocess


def _spelt(text, ids, vocabulary, length):
    """Returns a target decoded from its ids, unchanged if the ids lack a part of it."""
    if _lacks_pieces(ids, vocabulary):
        return text
    if _is_cut(text, ids, vocabulary, length):
        ids = vocabulary.encode(text)
        return text if _lacks_pieces(ids, vocabulary) else vocabulary.decode(ids)
    return vocabulary.decode(ids)


def unmatched(task: "seqio.Task", examples: Sequence[dict[str, Any]], length: int) -> str | None:
    """Counts the targets that even a prediction of their own ids does not match.

    Args:
        task: seqio.Task.
        examples: Examples of the task from its evaluator.
        length: int. Tokens of targets.

    Returns:
        A sentence with the counts and the first such target, None if every target can be matched.
    """
    vocabulary = task.output_features["targets"].vocabulary
    reasons, first, total = {}, None, 0
    for example in examples:
        total += 1
        text = example.get("targets_pretokenized")
        if not isinstance(text, bytes):
            continue
        text, ids = text.decode(errors="replace"), _ids(example, vocabulary)
        target, prediction = (task.postprocess_fn(spelling, example=example, is_target=is_target)
                              for spelling, is_target in ((text, True), (vocabulary.decode(ids), False)))
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
    """Returns a short text with visible blanks and newlines."""
    return repr(text if len(text) <= 80 else f"{text[:80]}...")


def _ids(example, vocabulary):
    """Returns the ids of an example's target before the end of sequence."""
    ids = np.asarray(example["targets"]).tolist()
    return ids[:ids.index(vocabulary.eos_id)] if vocabulary.eos_id in ids else ids


def _lacks_pieces(ids, vocabulary):
    return vocabulary.unk_id is not None and vocabulary.unk_id in ids


def _is_cut(text, ids, vocabulary, length):
    """Returns whether the ids fill the length and decode to less than the whole text."""
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
    """Returns whether a prediction equals the target, or one of several targets up to case, blanks and punctuation."""
    if isinstance(target, list | tuple | set) and isinstance(prediction, str):
        return any(_squashed(answer) == _squashed(prediction) for answer in target)
    if isinstance(target, np.ndarray) or isinstance(prediction, np.ndarray):
        return np.array_equal(target, prediction)
    return bool(target == prediction)


def _squashed(text):
    """Returns a text without case, blanks and punctuation, which the metrics of SQuAD and TriviaQA ignore."""
    return "".join(character for character in str(text).casefold()
                   if not character.isspace() and character not in _IGNORED)
