"""The labelled tasks of the docs corpus: no name and no file tells the answer; and what simple methods score."""

import re

import pytest
import seqio

from switch_tf.tasks import corpora, docs_corpus_baselines, docs_corpus_supervised, vocabularies


def document(path, *paragraphs, split="train"):
    return {"split": split, "object": f"{path}::name", "paragraphs": list(paragraphs)}


@pytest.fixture
def corpus(monkeypatch):
    """A function that puts documents in the place of the corpus."""

    def put(*documents):
        monkeypatch.setattr(corpora, "docs_corpus_documents", lambda: documents)

    return put


TWELVE = "one two three four five six seven eight nine ten eleven"


def test_names_of_libraries_are_masked_with_what_hangs_on_them(corpus):
    corpus(document("scipy/a.py", f"Spare np.linalg.norm, not space: {TWELVE} scikit-learn's pd.DataFrame, DataFrames.",
                    "SciPy and tensorflow_datasets and tf."))
    assert docs_corpus_supervised.library_examples("train") == {
        "inputs": [f"library: Spare _, not space: {TWELVE} _'s _, _. _ and _ and _."], "targets": ["scipy"]}


def test_short_texts_other_libraries_and_the_other_split_are_left_out(corpus):
    corpus(document("numpy/a.py", "Too short."), document("t5/a.py", TWELVE * 2),
           document("numpy/b.py", f"Kept: {TWELVE}."), document("numpy/c.py", f"Other: {TWELVE}.", split="validation"))
    assert docs_corpus_supervised.library_examples("train")["inputs"] == [f"library: Kept: {TWELVE}."]
    assert docs_corpus_supervised.library_examples("validation")["inputs"] == [f"library: Other: {TWELVE}."]


def test_what_masking_makes_equal_is_not_trained_on(corpus):
    corpus(document("numpy/a.py", f"NumPy: {TWELVE}."), document("jax/a.py", f"JAX: {TWELVE}.", split="validation"))
    assert docs_corpus_supervised.library_examples("train") == {"inputs": [], "targets": []}
    assert docs_corpus_supervised.library_examples("validation")["targets"] == ["jax"]


def test_a_summary_is_the_one_sentence_before_a_longer_text(corpus):
    corpus(document("t5/a.py", "It adds two numbers.", f"More {TWELVE}.", f"Still more {TWELVE}."),
           document("t5/b.py", "It is short. Two sentences.", TWELVE, TWELVE, TWELVE),
           document("t5/c.py", "The rest is short.", TWELVE), document("t5/d.py", TWELVE * 3, TWELVE * 3))
    assert docs_corpus_supervised.summary_examples("train") == {
        "inputs": [f"summarize: More {TWELVE}. Still more {TWELVE}."], "targets": ["It adds two numbers."]}


def test_a_name_that_one_module_defines_is_a_fact_about_it(corpus, monkeypatch):
    named = [("numpy/a.py", "norm"), ("numpy/b/__init__.py", "Array.sum"), ("t5/c.py", ""), ("t5/c.py", "get"),
             ("jax/d.py", "get"), ("numpy/a.py", "norm")]
    corpus(*({"split": "train", "object": f"{file}::{name}", "paragraphs": []} for file, name in named))
    assert docs_corpus_supervised.module_examples("train") == {
        "inputs": ["norm", "Array.sum"], "targets": ["numpy.a", "numpy.b"]}
    monkeypatch.setitem(docs_corpus_supervised.NUM_MODULE_EXAMPLES, "validation", 1)
    assert docs_corpus_supervised.module_examples("validation") == {"inputs": ["norm"], "targets": ["numpy.a"]}


def test_the_corpus_of_this_machine_has_so_many_facts():
    taught, asked = map(docs_corpus_supervised.module_examples, ("train", "validation"))
    counts = docs_corpus_supervised.NUM_MODULE_EXAMPLES
    assert {"train": len(taught["inputs"]), "validation": len(asked["inputs"])} == counts
    assert asked["targets"] == taught["targets"][:counts["validation"]]


@pytest.mark.parametrize("read, counts", [
    (docs_corpus_supervised.library_examples, docs_corpus_supervised.NUM_LIBRARY_EXAMPLES),
    (docs_corpus_supervised.summary_examples, docs_corpus_supervised.NUM_SUMMARY_EXAMPLES)])
def test_the_corpus_of_this_machine_has_so_many_examples_and_none_in_both_splits(read, counts):
    inputs = {split: read(split)["inputs"] for split in counts}
    assert {split: len(texts) for split, texts in inputs.items()} == counts
    assert not set(inputs["train"]) & set(inputs["validation"])


def test_no_held_out_text_names_a_library():
    names = "|".join((*docs_corpus_supervised.LIBRARIES, "scikit", "tensorflow", r"np\.", r"pd\."))
    held_out = docs_corpus_supervised.library_examples("validation")
    assert not [text for text in held_out["inputs"] if re.search(rf"\b({names})", text, re.IGNORECASE)]
    assert set(held_out["targets"]) == set(docs_corpus_supervised.LIBRARIES)


def examples_of(name, count):
    task = seqio.TaskRegistry.get(name)
    dataset = task.get_dataset({"inputs": 64, "targets": 16}, split="validation", shuffle=False, try_in_mem_cache=False)
    return task, list(dataset.take(count).as_numpy_iterator())


def test_examples_are_tokens_that_say_the_same(corpus):
    corpus(*(document("numpy/b.py", f"Kept: {TWELVE}.", split="validation"),) * 563)
    _, (example,) = examples_of("docs_corpus_library", 1)
    decode = vocabularies.docs_corpus().decode
    assert decode(example["inputs"].tolist()) == f"library: Kept: {TWELVE}."
    assert decode(example["targets"].tolist()) == "numpy" and example["targets"][-1] == 1


def test_a_library_is_scored_by_accuracy_and_macro_f1():
    task = seqio.TaskRegistry.get("docs_corpus_library")

    def scores(*predictions):
        targets, predicted = ([task.postprocess_fn(name, example={}, is_target=is_target) for name in names]
                              for names, is_target in ((docs_corpus_supervised.LIBRARIES, True), (predictions, False)))
        first, second = task.metric_fns
        return first(targets, predicted) | second(targets, predicted)

    assert scores(*docs_corpus_supervised.LIBRARIES) == {"accuracy": 100, "mean_10class_f1": pytest.approx(100)}
    # one of ten is right; its precision is 1/10 and its recall 1, so its F1 is 2/11, and a tenth of that the mean
    assert scores(*["jax"] * 10) == {"accuracy": 10, "mean_10class_f1": pytest.approx(100 * 2 / 11 / 10)}
    assert scores(*["no library"] * 10) == {"accuracy": 0, "mean_10class_f1": 0}


def test_a_summary_is_scored_by_rouge():
    task = seqio.TaskRegistry.get("docs_corpus_summary")
    (rouge,) = task.metric_fns
    assert rouge(["Adds two numbers."], ["Adds two numbers."]) == dict.fromkeys(
        ("rouge1", "rouge2", "rougeLsum"), pytest.approx(100))
    # one word of three is right: precision and recall are 1/3
    assert rouge(["Adds two numbers."], ["Takes two things."])["rouge1"] == pytest.approx(100 / 3)


@pytest.mark.filterwarnings("ignore:F-score is ill-defined")  # eight of the ten libraries have no text
def test_baselines_by_hand():
    training = {"inputs": ["an array", "an array", "an array", "a frame", "a frame", "a frame"],
                "targets": ["numpy"] * 3 + ["pandas"] * 3}
    held_out = {"inputs": ["the array", "array", "frame", "frame"], "targets": ["numpy", "numpy", "pandas", "numpy"]}
    assert docs_corpus_baselines.majority(held_out) == 75
    assert docs_corpus_baselines.tfidf(training, held_out)["accuracy"] == 75


@pytest.mark.slow  # fits a classifier to ten thousand texts
def test_the_baselines_of_the_documents_are_those_of_this_machine():
    measured = docs_corpus_baselines.measure()
    assert measured["num_examples"] == docs_corpus_supervised.NUM_LIBRARY_EXAMPLES["validation"]
    assert measured["majority_baseline"] == pytest.approx(19.2, abs=0.05)
    assert measured["tfidf_baseline"] == pytest.approx(60.7, abs=0.5)
    assert measured["tfidf_macro_f1"] == pytest.approx(55.5, abs=0.5)
