"""The docs corpus: real English text on every machine with switch_tf's requirements.

The text is the prose in the docstrings of the pinned distributions below: fluent technical English of a narrow
domain, a few megabytes. It is collected once (seconds to a minute) and kept under `~/.cache/switch_tf` (or
`$XDG_CACHE_HOME/switch_tf`). Its SHA-256 is checked at every load, so that token ids and losses are comparable. With
other installed versions, as after a plain `pip install`, the corpus consists of their prose, a sentence is printed, and
the fingerprint differs. `python -m switch_tf.tasks.corpora` prints the new constants after a change of the pins.
"""

import functools
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import warnings
from concurrent import futures
from importlib import metadata
from pathlib import Path

import tqdm

from switch_tf import environment
from switch_tf.tasks import docstrings, pinned

# Distribution -> (version, first 16 hexadecimal digits of the SHA-256 of its prose). Only distributions that have one
# version in all requirements files, and the same docstrings in the wheels for Python 3.11 and 3.12.
DISTRIBUTIONS = {
    "jax": ("0.10.2", "544997517b8e24aa"),
    "scipy": ("1.17.1", "9ea9c15a53378b6e"),
    "pandas": ("3.1.1", "013e1ba9465b8de2"),
    "keras": ("3.15.1", "9580ddc3be818b4f"),
    "scikit-learn": ("1.9.1", "41bd0fba9aa1042a"),
    "nltk": ("3.10.4", "392f8a9ecef50d66"),
    "tensorflow-datasets": ("4.9.10", "3872e4b732cee8e2"),
    "numpy": ("2.4.6", "32a7f0a588fa4913"),
    "orbax-checkpoint": ("0.12.8", "e5da503bd0cba4f9"),
    "flax": ("0.12.8", "45156674e617b860"),
    "optax": ("0.2.8", "63923033bf53f424"),
    "seqio": ("0.0.20", "7f0f588e522b2952"),
    "etils": ("1.15.0", "ce8cb7e0d2eb96ee"),
    "grpcio": ("1.85.1", "1f08949f97f9e86b"),
    "t5": ("0.9.4", "45e5ac391c821667"),
    "absl-py": ("2.5.1", "8dc91a6f2dc905da"),
    "h5py": ("3.14.0", "3cb69543877442bd"),
    "clu": ("0.0.12", "3244f1d193108827"),
    "gin-config": ("0.5.0", "7e06ce333dd35a6e"),
}
SHA256 = "b17a956e3d7144f8f883ad468ee2bffc4f8c0e4895b897b271f684bc216f5508"
NUM_DOCUMENTS = {"train": 18715, "validation": 1099}


def docs_corpus(split: str) -> list[str]:
    """Returns the documents of a split, each the paragraphs of one docstring, joined by newlines.

    The order is fixed and random, so a few documents from the front are a fair sample.

    Args:
        split: "train" or "validation".

    Raises:
        RuntimeError: A distribution was edited.
    """
    return ["\n".join(document["paragraphs"]) for document in docs_corpus_documents() if document["split"] == split]


@functools.cache
def docs_corpus_documents() -> tuple[dict, ...]:
    """Returns every document as `{"split": ..., "object": "file::name", "paragraphs": [...]}`.

    Raises:
        RuntimeError: See `docs_corpus`.
    """
    return tuple(map(json.loads, _content().splitlines()))


def content_digest() -> str:
    """Returns the digest of this machine's corpus, which is collected if it is not cached."""
    return pinned.digest(_content())


@functools.cache
def _content() -> bytes:
    path = cache_path()
    try:
        content = path.read_bytes()
    except OSError:
        content = b""
    if hashlib.sha256(content).hexdigest() == SHA256:
        return content
    if difference := pinned.describe_difference("docs corpus", DISTRIBUTIONS):
        return _content_of_other_versions(difference)
    content = _collect()  # absent, torn or edited
    found = hashlib.sha256(content).hexdigest()
    if found != SHA256:
        raise RuntimeError(
            f"The docs corpus has SHA-256 {found} instead of {SHA256} although every distribution is the pinned one: "
            "the code that collects it changed; run python -m switch_tf.tasks.corpora for the new constants."
        )
    _write_cache(path, content)
    return content


def _content_of_other_versions(difference):
    """Returns the corpus of the installed versions, kept in a file with its digest as name."""
    print(difference, file=sys.stderr, flush=True)
    key = pinned.digest(json.dumps(pinned.installed(DISTRIBUTIONS)).encode())
    folder = environment.cache_folder() / f"installed_{key}"
    for path in sorted(folder.glob("docs_corpus_*.jsonl")):
        content = path.read_bytes()
        if path.stem == f"docs_corpus_{pinned.digest(content)}":
            return content
    content = _collect()
    _write_cache(folder / f"docs_corpus_{pinned.digest(content)}.jsonl", content)
    return content


def cache_path() -> Path:
    """Returns the path of the corpus of the pinned versions."""
    return environment.cache_folder() / SHA256[:16] / "docs_corpus.jsonl"


def _collect() -> bytes:
    """Reads the installed distributions and returns the corpus as JSON lines."""
    prose = _read_distributions()
    pinned.check_digests("docs corpus", DISTRIBUTIONS, prose)
    return _assemble(prose)


def _read_distributions() -> dict[str, bytes]:
    """Returns the JSON that `docstrings.py` prints for every distribution, read in parallel processes."""
    # -P keeps this folder off the import path of the worker, which must find what this process would find.
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}

    def read(name):
        command = [sys.executable, "-P", docstrings.__file__, name]
        return subprocess.run(command, env=variables, check=True, stdout=subprocess.PIPE).stdout

    with futures.ThreadPoolExecutor(min(os.cpu_count() or 1, 8)) as executor:
        tasks = {name: executor.submit(read, name) for name in pinned.installed(DISTRIBUTIONS)}
        progress = tqdm.tqdm(
            futures.as_completed(tasks.values()),
            "Collecting the docs corpus, once",
            len(tasks),
            unit=" distributions",
            delay=3,
            leave=False,
        )
        for task in progress:
            task.result()
    return {name: task.result() for name, task in tasks.items()}


def _assemble(prose: dict[str, bytes]) -> bytes:
    """Drops repeated paragraphs and splits the documents, all from one file to the same side."""
    seen = set()
    lines = []
    for name in sorted(prose):
        for document in json.loads(prose[name]):
            paragraphs = []
            for paragraph in document["paragraphs"]:
                letters = re.sub(r"\W+", "", paragraph.lower())
                if letters not in seen:
                    seen.add(letters)
                    paragraphs.append(paragraph)
            if paragraphs:
                file = document["object"].partition("::")[0]
                split = pinned.split_of(file)
                line = json.dumps({"split": split, "object": document["object"], "paragraphs": paragraphs})
                lines.append(line.encode() + b"\n")
    return b"".join(sorted(lines, key=pinned.digest))


def _write_cache(path: Path, content: bytes) -> None:
    """Writes the file in one step, so that another process never reads half of it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            whole = Path(folder) / path.name
            whole.write_bytes(content)
            whole.replace(path)
    except OSError as error:
        warnings.warn(
            f"The docs corpus could not be kept in {path.parent} ({error}), so every process collects it "
            "anew; set XDG_CACHE_HOME to a folder that can be written.",
            stacklevel=2,
        )


def _print_constants() -> None:
    prose = _read_distributions()
    content = _assemble(prose)
    for name, text in prose.items():
        print(f'    "{name}": ("{metadata.version(name)}", "{pinned.digest(text)}"),')
    print(f'SHA256 = "{hashlib.sha256(content).hexdigest()}"')
    splits = [json.loads(line)["split"] for line in content.splitlines()]
    print(f'NUM_DOCUMENTS = {{"train": {splits.count("train")}, "validation": {splits.count("validation")}}}')


if __name__ == "__main__":
    _print_constants()
