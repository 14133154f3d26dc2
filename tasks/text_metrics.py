"""Metrics of texts by the names that gin files use in `METRICS`."""

import math
from collections.abc import Callable, Sequence

from switch_tf.configs.choices import check_choice
from switch_tf.refusals import Refusal
from switch_tf.tasks import metrics

NAMES = ("accuracy", "f1", "sequence_accuracy", "edit_distance", "bleu", "rouge", "squad", "trivia_qa", "pearson",
         "spearman")
NO_NUMBER = -1.0  # t5's value of a prediction that is no number, in GLUE's STS-B


def metric_functions(names: str | Sequence[str]) -> list[Callable]:
    """Returns seqio's metric functions, of `targets` and `predictions`, both lists of str; values in percent.

    Args:
        names: One or more of `NAMES`. "f1" is the mean F1 of the labels, "squad" and "trivia_qa" are exact match and F1
            of words after normalisation. "pearson" and "spearman" correlate targets and predictions that are numbers,
            as in GLUE's STS-B. A prediction that is no number counts as -1, and the correlation of constant predictions
            or targets is 0.

    Raises:
        Refusal: A name is unknown.
    """
    names = [names] if isinstance(names, str) else names
    if not isinstance(names, list | tuple):
        raise Refusal(f"METRICS must be a list of names, not {names!r}.")
    for name in names:
        check_choice("METRICS", name, NAMES)
    own = {"f1": _mean_f1, "squad": _with_one_answer(metrics.squad), "trivia_qa": _with_one_answer(metrics.trivia_qa),
           "pearson": _of_numbers(metrics.pearson_corrcoef), "spearman": _of_numbers(metrics.spearman_corrcoef)}
    return [own.get(name) or getattr(metrics, name) for name in names]


def _mean_f1(targets, predictions):
    """Returns the mean F1 of the labels among the targets. Any other prediction is wrong."""
    import sklearn.metrics

    score = sklearn.metrics.f1_score(targets, predictions, labels=sorted(set(targets)), average="macro",
                                     zero_division=0)
    return {"f1": 100 * float(score)}


def _with_one_answer(metric):
    """Adapts a metric of several right answers to one answer."""
    def measure(targets, predictions):
        return metric([[target] for target in targets], predictions)

    measure.__name__ = metric.__name__
    return measure


def _of_numbers(metric):
    """Adapts a correlation of numbers to texts, with 0 for undefined correlations, as of constants."""
    def measure(targets, predictions):
        numbers = [_number(target) for target in targets]
        for target, number in zip(targets, numbers, strict=True):
            if number is None:
                raise Refusal(f"METRICS has {metric.__name__}, which needs numbers as targets, not {target!r}.")
        predicted = [NO_NUMBER if number is None else number for number in map(_number, predictions)]
        if len(set(numbers)) < 2 or len(set(predicted)) < 2:
            return {metric.__name__: 0.0}
        values = {name: float(value) for name, value in metric(numbers, predicted).items()}
        return {name: value if math.isfinite(value) else 0.0 for name, value in values.items()}

    measure.__name__ = metric.__name__
    return measure


def _number(text):
    """Returns the finite number that a text spells, or None."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
