"""A model that answers with exactly the ids of every target: full marks, or a sentence that counts the others."""

import functools
import json

import numpy as np
import pytest
import sentencepiece
import seqio
import tensorflow as tf
from t5.data import postprocessors
from t5.evaluation import metrics

from switch_tf import data
from switch_tf.tasks import preprocessors, text_files, vocabularies

LENGTH = 16


@pytest.fixture(scope="module")
def without_bytes(tmp_path_factory):
    """The path of a vocabulary that has no piece for a character of another script."""
    prefix = str(tmp_path_factory.mktemp("vocabulary") / "small")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["yes no right a long target of very many words the cat"] * 20), model_prefix=prefix,
        vocab_size=30, pad_id=0, eos_id=1, unk_id=2, bos_id=-1, hard_vocab_limit=False, minloglevel=2)
    return f"{prefix}.model"


def _scores(name, vocabulary="docs_corpus"):
    """The metrics of a perfect model, and the warnings."""
    evaluator = data.Evaluator(data.DatasetDescription(name, {"inputs": 32, "targets": LENGTH}, 2, "validation",
                                                       vocabulary=vocabulary))
    [task] = evaluator._evaluator.eval_tasks
    examples = evaluator._evaluator.cached_task_datasets[task.name].as_numpy_iterator()
    ids = [example["targets"] for example in examples]
    rows = iter(np.array([np.pad(row, (0, LENGTH - len(row))) for row in ids]))
    found = evaluator.evaluate(lambda features: np.array([next(rows, np.zeros(LENGTH, int)) for _ in range(2)]),
                               lambda features: np.zeros(2))
    return found[task.name].metrics, evaluator.warnings


def _of_files(folder, targets, vocabulary="docs_corpus"):
    path = folder / "held_out.jsonl"
    path.write_text("".join(json.dumps({"inputs": f"text {index}", "targets": target}) + "\n"
                            for index, target in enumerate(targets)))
    return _scores(text_files.text_to_text(str(path), str(path), metrics=["accuracy"], name="perfect"), vocabulary)


def test_what_the_vocabulary_spells_otherwise_is_right(tmp_path):
    targets = ["positive", "positive ", " positive", "two  words", "line one\nline two", "tab\there", "ﬁne", "ＡＢＣ",
               "cafe\u0301", "zero\u200bwidth", "a <extra_id_0> b", "<extra_id_3>"]
    assert _of_files(tmp_path, targets) == ({"accuracy": 100}, [])


def test_an_answer_that_differs_is_wrong_still(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"inputs": "x", "targets": "a  b"}) + "\n")
    name = text_files.text_to_text(str(path), str(path), metrics=["accuracy"], name="perfect")
    evaluator = data.Evaluator(data.DatasetDescription(name, {"inputs": 32, "targets": LENGTH}, 1, "validation",
                                                       vocabulary="docs_corpus"))
    ids = vocabularies.docs_corpus().encode("ab")
    found = evaluator.evaluate(lambda features: np.array([[*ids, 1]]), None)[name]
    assert found.metrics == {"accuracy": 0} and found.records[0]["targets"] == "a  b"


def test_targets_that_no_prediction_can_match_are_counted_with_their_reasons(tmp_path, without_bytes):
    targets = ["right", "日本", "a long target of very many words " * 9, "right "]
    scores, warnings = _of_files(tmp_path, targets, without_bytes)
    assert scores == {"accuracy": 50}
    [sentence] = warnings
    assert sentence.startswith("2 of 4 targets of 'perfect' cannot be matched by any prediction")
    assert "1 longer than the 16 tokens of targets (TASK_FEATURE_LENGTHS)" in sentence
    assert "1 with characters that the vocabulary lacks" in sentence and "'日本' as " in sentence


@pytest.mark.parametrize(("labels", "counted"), [(["yes", "no"], 0), (["yes  sir", "no"], 1), (["日", "no"], 1)])
def test_labels_that_cannot_be_spelt_are_counted(without_bytes, labels, counted):
    scores, warnings = _of_task([{"inputs": "x", "targets": label} for label in labels], without_bytes,
                                metrics.accuracy,
                                functools.partial(postprocessors.string_label_to_class_id, label_classes=labels))
    assert scores == {"accuracy": 100 - 50 * counted}
    assert [sentence[:6] for sentence in warnings] == ["1 of 2"] * counted


def test_one_of_several_answers_is_right_but_for_case_and_blanks(without_bytes):
    examples = [{"inputs": "x", "targets": "the  cat ", "answers": ["The  Cat.", "cats"]},
                {"inputs": "x", "targets": "日本", "answers": ["日本", "Japan"]},
                # Only the letters match: the sign of an unknown piece stays in the prediction.
                {"inputs": "x", "targets": "日 the cat", "answers": ["{the cat}", "a cat"]}]
    scores, warnings = _of_task(examples, without_bytes, metrics.squad, postprocessors.qa)
    assert scores["em"] == pytest.approx(100 / 3)
    assert [sentence[:6] for sentence in warnings] == ["2 of 3"]


def test_published_references_stay_as_they_are():
    examples = [{"inputs": "x", "targets": target} for target in ("a  b", "c")]
    scores, warnings = _of_task(examples, "docs_corpus", metrics.accuracy)
    assert scores == {"accuracy": 50}
    assert "1 spelt otherwise by the vocabulary. The first is 'a  b' as 'a b'." in warnings[0]


def _of_task(examples, vocabulary, metric, postprocess_fn=None):
    def read(split, shuffle_files=False, seed=None):
        return tf.data.Dataset.from_tensor_slices({name: [one[name] for one in examples] for name in examples[0]})

    seqio.TaskRegistry.add(
        "perfect_task", source=seqio.FunctionDataSource(read, splits=["train", "validation"]), metric_fns=[metric],
        postprocess_fn=postprocess_fn, output_features=preprocessors.output_features(vocabularies.docs_corpus()),
        preprocessors=[seqio.preprocessors.tokenize, seqio.preprocessors.append_eos_after_trim])
    try:
        return _scores("perfect_task", vocabulary)
    finally:
        seqio.TaskRegistry.remove("perfect_task")
