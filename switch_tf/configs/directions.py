"""Whether a lower or a higher value of a metric is better."""

import re

from switch_tf.configs.choices import by_name

# Ends of metric names. The longest match decides: negative_log_likelihood before log_likelihood.
_IS_LOWER = by_name({False: """
accuracy acc em exact_match match f1 f2 f_measure fmeasure precision recall sensitivity specificity iou dice jaccard
bleu sacrebleu spbleu chrf chrf2 meteor rouge rouge1 rouge2 rougel rougelsum bertscore bleurt comet cider spice gleu
pearson spearman kendall pearson_corrcoef spearman_corrcoef pearsonr spearmanr corrcoef correlation matthews mcc
matthews_corrcoef kappa r2 auc roc_auc auroc auc_roc auc_pr pr_auc auprc average_precision map mrr ndcg hits hit_rate
pass likelihood log_likelihood loglikelihood log_prob logprob neg_log_perplexity negative_log_perplexity
true_positive_rate true_negative_rate tpr tnr win_rate success_rate solve_rate average
""", True: """
loss logloss cross_entropy xent perplexity ppl nll negative_log_likelihood neg_log_likelihood
negative_loglikelihood neg_loglikelihood negative_log_prob neg_log_prob bits_per_byte bits_per_character bits_per_char
bits_per_token bits_per_dim bits_per_word bpb bpc bpd bpt kl kl_divergence divergence distance edit edits edit_distance
error errors err mistakes error_rate edit_rate miss_rate wer cer ter mer eer mse rmse mae mape smape msle rmsle
medae squared_error absolute_error percentage_error false_positive_rate false_negative_rate false_discovery_rate fpr fnr
fdr brier ece calibration_error crps hinge fid latency perplexity_per_word perplexity_per_byte
"""})
# Qualifiers of a metric: "bleu_score", "f1_macro", "hits_at_10".
_QUALIFIERS = {"score", "macro", "micro", "weighted", "mean", "avg", "min", "max", "sum", "total", "median",
               "overall", "at", "k"}


def is_lower_better(name: str, declared: dict[str, bool] | None = None) -> bool | None:
    """Returns whether the lowest value of a metric is its best one, or None if that is unknown.

    Args:
        name: Such as "mean_edit" or "eval/<task>/loss".
        declared: Directions that metrics declare (`lower_is_better`), by name. They take precedence.
    """
    if declared and name in declared:
        return declared[name]
    words = [word for word in re.split(r"[^a-z0-9]+", name.rpartition("/")[2].lower()) if word]
    while words and (words[-1] in _QUALIFIERS or words[-1].isdigit()):
        words.pop()
    for start in range(len(words)):
        if (is_lower := _IS_LOWER.get("_".join(words[start:]))) is not None:
            return is_lower
    return None


def declared_in(records: list[dict]) -> dict[str, bool]:
    """Returns the directions that metrics declare in records of `metrics.jsonl`."""
    return {name: is_lower for record in records if isinstance(declared := record.get("lower_is_better"), dict)
            for name, is_lower in declared.items() if isinstance(is_lower, bool)}
