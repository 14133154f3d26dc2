"""Tasks with inputs and targets that need no download, from the docs corpus (`corpora.py`).

* `docs_corpus_library`: the library, out of ten, that a docstring with masked names documents.
* `docs_corpus_summary`: the first sentence of a docstring, from the rest of it.
* `docs_corpus_module`: the module that defines a documented class or function, from its name: closed-book recall.

The first two keep the splits of the corpus, by file: neither a file nor a paragraph is in both. The third has no
held-out facts: its validation examples are training examples. Importing registers the tasks and reads nothing.
"""

import re

import seqio

from switch_tf.tasks import corpora, docs_corpus, metrics, preprocessors, text_to_text, vocabularies

# The libraries with the most documents in the corpus, by the name of their folder.
LIBRARIES = (
    "pandas",
    "scipy",
    "jax",
    "nltk",
    "sklearn",
    "keras",
    "orbax",
    "tensorflow_datasets",
    "numpy",
    "flax",
)
NUM_LIBRARY_EXAMPLES = {"train": 10349, "validation": 563}
NUM_SUMMARY_EXAMPLES = {"train": 3126, "validation": 192}
NUM_MODULE_EXAMPLES = {"train": 16675, "validation": 4096}

# Names of the libraries, their usual abbreviations, and classes of only one of them, each with the words that follow
# dots and hyphens, as in `np.ndarray` and "scikit-learn".
_NAMES = re.compile(
    r"\b(?:(?:pandas|scipy|jax|nltk|sklearn|scikit|keras|orbax|tensorflow|tfds|numpy|flax|linen|dataframe)\w*"
    r"|(?:pd|sp|jnp|ocp|tf|np|nn|nnx|xla|series)\b)(?:[.-]\w+)*",
    re.IGNORECASE,
)
_MIN_WORDS = 12


def library_examples(split: str) -> dict[str, list[str]]:
    """Returns inputs "library: TEXT", in which every name of a library is "_", and the libraries as targets."""
    # Without names, some texts of two libraries are the same.
    held_out = set(library_examples("validation")["inputs"]) if split == "train" else ()
    inputs, targets = [], []
    for document in corpora.docs_corpus_documents():
        library = document["object"].partition("/")[0]
        if document["split"] != split or library not in LIBRARIES:
            continue
        text = "library: " + _NAMES.sub("_", " ".join(document["paragraphs"]))
        if len(text.split()) > _MIN_WORDS and text not in held_out:
            inputs.append(text)
            targets.append(library)
    return {"inputs": inputs, "targets": targets}


def summary_examples(split: str) -> dict[str, list[str]]:
    """Returns inputs "summarize: TEXT" and the sentences before those texts, of 4 to 25 words, as targets."""
    inputs, targets = [], []
    for document in corpora.docs_corpus_documents():
        first, rest = document["paragraphs"][0], " ".join(document["paragraphs"][1:])
        is_sentence = 4 <= len(first.split()) <= 25 and not re.search(r"[.!?] ", first)
        if document["split"] == split and is_sentence and len(rest.split()) >= 2 * _MIN_WORDS:
            inputs.append(f"summarize: {rest}")
            targets.append(first)
    return {"inputs": inputs, "targets": targets}


def module_examples(split: str) -> dict[str, list[str]]:
    """Returns names that only one module defines, such as "DataFrame.groupby", and those modules.

    They have the random order of the corpus. The validation split is its beginning.
    """
    files = {}
    for document in corpora.docs_corpus_documents():
        file, _, name = document["object"].partition("::")
        if name:
            files.setdefault(name, set()).add(file)
    facts = [(name, *modules) for name, modules in files.items() if len(modules) == 1][: NUM_MODULE_EXAMPLES[split]]
    modules = [file.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for _, file in facts]
    return {"inputs": [name for name, _ in facts], "targets": modules}


def class_of(library: str, example: dict | None = None, is_target: bool = False) -> int:
    """Returns the index of a library among `LIBRARIES`, -1 for any other text. seqio passes the other arguments."""
    del example, is_target
    return LIBRARIES.index(library) if library in LIBRARIES else -1


seqio.TaskRegistry.add(
    "docs_corpus_library",
    source=docs_corpus.source(library_examples, NUM_LIBRARY_EXAMPLES),
    preprocessors=text_to_text.tokens(),
    postprocess_fn=class_of,
    metric_fns=[metrics.accuracy, metrics.mean_multiclass_f1(num_classes=len(LIBRARIES))],
    output_features=preprocessors.output_features(vocabularies.docs_corpus()),
)
seqio.TaskRegistry.add(
    "docs_corpus_summary",
    source=docs_corpus.source(summary_examples, NUM_SUMMARY_EXAMPLES),
    preprocessors=text_to_text.tokens(),
    metric_fns=[metrics.rouge],
    output_features=preprocessors.output_features(vocabularies.docs_corpus()),
)
seqio.TaskRegistry.add(
    "docs_corpus_module",
    source=docs_corpus.source(module_examples, NUM_MODULE_EXAMPLES),
    preprocessors=text_to_text.tokens(),
    metric_fns=[metrics.sequence_accuracy],
    output_features=preprocessors.output_features(vocabularies.docs_corpus()),
)
