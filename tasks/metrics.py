"""Metrics of text with the names, units and values of t5: percent, except for `edit_distance`, which counts words.

Each is a function of targets and predictions, lists of equal length, and returns name -> value. Slow packages are
imported when a metric is computed.
"""

import collections
import re
import string
from collections.abc import Callable, Sequence

import numpy as np

Texts = Sequence[str]
# Characters of an answer that TriviaQA's evaluation script replaces by blanks.
_TRIVIA_QA_PUNCTUATION = string.punctuation + "‘’´`_"


def accuracy(targets: Sequence, predictions: Sequence) -> dict[str, float]:
    """Returns the share of predictions that equal their targets, which may be texts or classes."""
    return {"accuracy": _share_of_equal(targets, predictions)}


def sequence_accuracy(targets: Texts, predictions: Texts) -> dict[str, float]:
    """Returns the share of predictions that equal their targets exactly."""
    return {"sequence_accuracy": _share_of_equal(targets, predictions)}


def _share_of_equal(targets, predictions):
    return 100 * float(np.mean([target == prediction for target, prediction in zip(targets, predictions, strict=True)]))


def mean_multiclass_f1(num_classes: int) -> Callable:
    """Returns a metric: the mean F1 of the classes 0 to `num_classes` - 1."""
    name = f"mean_{num_classes}class_f1"

    def metric(targets, predictions):
        import sklearn.metrics

        score = sklearn.metrics.f1_score(targets, predictions, labels=range(num_classes), average="macro")
        return {name: 100 * float(score)}

    metric.__name__ = name
    return metric


def pearson_corrcoef(targets: Sequence[float], predictions: Sequence[float]) -> dict[str, float]:
    """Returns Pearson's correlation of numbers."""
    import scipy.stats

    return {"pearson_corrcoef": 100 * scipy.stats.pearsonr(targets, predictions)[0]}


def spearman_corrcoef(targets: Sequence[float], predictions: Sequence[float]) -> dict[str, float]:
    """Returns Spearman's correlation of the ranks of numbers."""
    import scipy.stats

    return {"spearman_corrcoef": 100 * scipy.stats.spearmanr(targets, predictions)[0]}


def bleu(targets: Texts | Sequence[Texts], predictions: Texts) -> dict[str, float]:
    """Returns sacrebleu's BLEU, with the tokens of WMT's international tokenizer.

    Args:
        targets: list of str, or a list for each set of references.
        predictions: list of str.
    """
    import sacrebleu

    references = [list(texts) for texts in targets] if isinstance(targets[0], list) else [targets]
    score = sacrebleu.corpus_bleu(predictions, references, smooth_method="exp", smooth_value=0.0, force=False,
                                  lowercase=False, tokenize="intl", use_effective_order=False)
    return {"bleu": score.score}


def rouge(targets: Texts, predictions: Texts) -> dict[str, float]:
    """Returns the F1 of ROUGE-1, ROUGE-2 and ROUGE-Lsum, the middle of a bootstrap over the examples."""
    from rouge_score import rouge_scorer, scoring

    names = ("rouge1", "rouge2", "rougeLsum")
    scorer, scores = rouge_scorer.RougeScorer(names), scoring.BootstrapAggregator()
    for target, prediction in zip(targets, predictions, strict=True):
        # For ROUGE-Lsum, lines are sentences.
        target, prediction = (text.replace(" . ", " .\n") for text in (target, prediction))
        scores.add_scores(scorer.score(target, prediction))
    aggregated = scores.aggregate()
    return {name: 100 * aggregated[name].mid.fmeasure for name in names}


def edit_distance(targets: Texts, predictions: Texts) -> dict[str, float]:
    """Counts words to insert, delete or replace, in lower case: least, most, mean, median and sum over the examples."""
    import editdistance

    words = [[re.split(r"[^\w]", text.lower()) for text in texts] for texts in (predictions, targets)]
    distances = [editdistance.distance(*pair) for pair in zip(*words, strict=True)]
    return {"min_edit": min(distances), "max_edit": max(distances), "mean_edit": np.mean(distances),
            "median_edit": np.median(distances), "sum_edit": sum(distances)}


def squad(targets: Sequence[Texts], predictions: Texts) -> dict[str, float]:
    """Returns the exact match `em` and the `f1` of words, each the best over the right answers, as SQuAD's script."""
    return _answers(targets, predictions, lambda text: _normalized(text, string.punctuation, ""))


def trivia_qa(targets: Sequence[Texts], predictions: Texts) -> dict[str, float]:
    """Returns `em` and `f1` as TriviaQA's script does: punctuation separates words."""
    return _answers(targets, predictions, lambda text: _normalized(text, _TRIVIA_QA_PUNCTUATION, " "))


def _answers(targets, predictions, normalized):
    matches, overlaps = [], []
    for answers, prediction in zip(targets, predictions, strict=True):
        prediction, answers = normalized(prediction), [normalized(answer) for answer in answers]
        matches.append(max(answer == prediction for answer in answers))
        overlaps.append(max(_f1(answer.split(), prediction.split()) for answer in answers))
    return {"em": 100 * np.mean(matches), "f1": 100 * np.mean(overlaps)}


def _normalized(text, punctuation, replacement):
    """Returns a text in lower case, without articles and punctuation, with one blank between words."""
    text = text.lower().translate({ord(sign): replacement for sign in punctuation})
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def _f1(target_words, predicted_words):
    common = sum((collections.Counter(target_words) & collections.Counter(predicted_words)).values())
    if not common:
        return 0
    precision, recall = common / len(predicted_words), common / len(target_words)
    return 2 * precision * recall / (precision + recall)
