"""Whether a lower or a higher value of a metric is better."""

import re

# The last word of a name decides. Every other metric is better the higher it is: accuracy, f1, em, bleu, rouge,
# pearson, spearman, matthews (mcc), auc, likelihoods.
_LOWER = re.compile(
    r"(loss|perplexity)$|(^|[^a-z])(cross_entropy|bits_per_(byte|character)|edit"
    r"|(edit_|hamming_|levenshtein_)?distance|errors?|(edit|error|miss)_rate|wer|cer|ter|mse|rmse|mae|nll|brier|ece)$",
    re.IGNORECASE)


def is_lower_better(name: str, declared: dict[str, bool] | None = None) -> bool:
    """Returns whether the lowest value of a metric is its best one.

    Args:
        name: str. A metric's own name, such as "mean_edit", or the one that evaluations write, "eval/<task>/loss".
        declared: Directions that metrics declare (`lower_is_better`), by name. They take precedence over the name.
    """
    if declared and name in declared:
        return declared[name]
    return _LOWER.search(name) is not None


def declared_in(records: list[dict]) -> dict[str, bool]:
    """Returns the directions that the metrics of a run declare, from the records of its `metrics.jsonl`."""
    found = {}
    for record in records:
        declared = record.get("lower_is_better")
        if isinstance(declared, dict):
            found.update({name: is_lower for name, is_lower in declared.items() if isinstance(is_lower, bool)})
    return found
