"""A pretraining task on Python sources on every machine with switch_tf's requirements, without a download.

* `source_corpus_span_corruption`: T5's objective on the files of the distributions that the docs corpus is made of
  (`corpora.py`), 4096 SentencePiece ids that keep every space and newline.

Sixteen times as much text as the docs corpus, so that models can be compared before they read it twice. Importing
registers the task and reads nothing. The files are read and checked, in a few seconds, when a data set is first read.
`python -m switch_tf.tasks.source_corpus` prints the new constants after a change of the pins.
"""

import functools
import hashlib
import re
import sys

import seqio

from switch_tf.tasks import corpora, docstrings, in_memory, pinned, preprocessors, vocabularies

# Digests of the sources of the docs corpus. Their files are the same in the wheels for Python 3.11 and 3.12, except for
# those that `_GENERATED` matches.
_DIGESTS = {
    "jax": "d83839252b397be6",
    "scipy": "493cae1a6cab8d6c",
    "pandas": "ae74e5252053bb86",
    "keras": "37bf3859bb21d230",
    "scikit-learn": "3bf30450e4ef1acc",
    "nltk": "8acec6a9e758d855",
    "tensorflow-datasets": "109553a1e6e930d7",
    "numpy": "d4ad10637c107e60",
    "orbax-checkpoint": "6f82be27e076a84c",
    "flax": "0ac8546729c53ab3",
    "optax": "68e0a30ed37bc47a",
    "seqio": "8d02c3ef9111f53b",
    "etils": "cd6dd971a87c88ab",
    "grpcio": "6870d1afd198a7be",
    "t5": "f00cfc43dc14a0da",
    "absl-py": "4fd292da5409b382",
    "h5py": "065c3a7f44c3a09a",
    "clu": "49a179e0ea49a99a",
    "gin-config": "8bfb2cddd6f8a057",
}
# Distribution -> (version, digest of its sources).
DISTRIBUTIONS = {name: (version, _DIGESTS.get(name)) for name, (version, _) in corpora.DISTRIBUTIONS.items()}
SHA256 = "a9525205be63fb0e5f9cc5a062bc45d333e23875b85730b3bdc7c05356df9663"
NUM_FILES = {"train": 4151, "validation": 239}

_GENERATED = re.compile(r"(^|/)__config__\.py$")  # names the compiler of a wheel
_BLANK_LINES = re.compile(r"\n(?:[ \t]*\n)+")


def read_sources(split: str) -> dict[str, list[str]]:
    """Returns the files of a split as the feature "text", in a fixed random order.

    Repeated blocks between blank lines, such as licences, are left out.

    Args:
        split: "train" or "validation".

    Raises:
        RuntimeError: A distribution was edited.
    """
    return {"text": [text for file, text in _sources() if pinned.split_of(file) == split]}


def content_digest() -> str:
    """Reads this machine's corpus and returns its digest."""
    return pinned.digest(_joined(_sources()))


@functools.cache
def _sources() -> tuple[tuple[str, str], ...]:
    """Returns the name and the text of every file, after checking the files of pinned versions."""
    if difference := pinned.describe_difference("source corpus", DISTRIBUTIONS):
        print(difference, file=sys.stderr, flush=True)
    files = _read_distributions(pinned.installed(DISTRIBUTIONS))
    pinned.check_digests("source corpus", DISTRIBUTIONS, {name: _joined(own) for name, own in files.items()})
    found = _assemble(files)
    sha256 = hashlib.sha256(_joined(found)).hexdigest()
    if sha256 != SHA256 and not difference:
        raise RuntimeError(
            f"The source corpus has SHA-256 {sha256} instead of {SHA256} although every distribution is the pinned "
            "one: the code that collects it changed; run python -m switch_tf.tasks.source_corpus for the new constants."
        )
    return found


def _read_distributions(names):
    return {name: [one for one in docstrings.read_files(name) if not _GENERATED.search(one[0])] for name in names}


def _assemble(files):
    """Files without repeated blocks, in the order of their digests."""
    seen = set()
    found = []
    for name in sorted(files):
        for file, text in files[name]:
            blocks = []
            for block in _BLANK_LINES.split(text.strip("\n")):
                if (words := " ".join(block.split())) and words not in seen:
                    seen.add(words)
                    blocks.append(block)
            if blocks:
                found.append((file, "\n\n".join(blocks)))
    return tuple(sorted(found, key=lambda one: pinned.digest(one[0].encode())))


def _joined(files) -> bytes:
    return "".join(f"{file}\0{text}\0" for file, text in files).encode()


def _print_constants() -> None:
    files = _read_distributions(corpora.DISTRIBUTIONS)
    for name, own in files.items():
        print(f'    "{name}": "{pinned.digest(_joined(own))}",')
    found = _assemble(files)
    print(f'SHA256 = "{hashlib.sha256(_joined(found)).hexdigest()}"')
    splits = [pinned.split_of(file) for file, _ in found]
    print(f'NUM_FILES = {{"train": {splits.count("train")}, "validation": {splits.count("validation")}}}')


seqio.TaskRegistry.add(
    "source_corpus_span_corruption",
    source=in_memory.InMemorySource("source corpus", read_sources, NUM_FILES, content_digest),
    preprocessors=preprocessors.pretraining(preprocessors.span_corruption),
    output_features=preprocessors.output_features(vocabularies.source_corpus()),
    metric_fns=[],
)

if __name__ == "__main__":
    _print_constants()
