"""Scores of methods without a neural network on `docs_corpus_library`: accuracy and macro F1, in percent.

`python -m switch_tf.tasks.docs_corpus_baselines` measures them on the corpus of this machine, in half a minute.
"""

import collections
import json
from collections.abc import Mapping, Sequence

from sklearn import feature_extraction, linear_model

from switch_tf.tasks import docs_corpus_supervised, metrics
from switch_tf.tasks.docs_corpus_supervised import LIBRARIES

Examples = Mapping[str, Sequence[str]]


def majority(held_out: Examples) -> float:
    """Returns the accuracy of always predicting the most frequent held-out answer, in percent.

    Args:
        held_out: `{"inputs": ..., "targets": ...}`.
    """
    ((_, count),) = collections.Counter(held_out["targets"]).most_common(1)
    return 100 * count / len(held_out["targets"])


def tfidf(training: Examples, held_out: Examples) -> dict[str, float]:
    """Returns the scores of logistic regression on TF-IDF of words and pairs of words, by the task's own metrics.

    Args:
        training, held_out: `{"inputs": ..., "targets": ...}`.
    """
    vectorizer = feature_extraction.text.TfidfVectorizer(ngram_range=(1, 2), min_df=3, sublinear_tf=True)
    classifier = linear_model.LogisticRegression(C=10, tol=1e-3)
    classifier.fit(vectorizer.fit_transform(training["inputs"]), training["targets"])
    predicted = classifier.predict(vectorizer.transform(held_out["inputs"]))
    targets, predictions = ([LIBRARIES.index(name) for name in names] for names in (held_out["targets"], predicted))
    return metrics.accuracy(targets, predictions) | metrics.mean_multiclass_f1(len(LIBRARIES))(targets, predictions)


def measure() -> dict:
    """Returns `metric`, `num_examples` held out, `majority_baseline`, `tfidf_baseline` and `tfidf_macro_f1`."""
    training, held_out = map(docs_corpus_supervised.library_examples, ("train", "validation"))
    accuracy, macro_f1 = tfidf(training, held_out).values()
    return {
        "metric": "accuracy",
        "num_examples": len(held_out["targets"]),
        "majority_baseline": majority(held_out),
        "tfidf_baseline": float(accuracy),
        "tfidf_macro_f1": float(macro_f1),
    }


if __name__ == "__main__":
    print(json.dumps(measure()))
