"""Finds the English prose in the docstrings of an installed distribution.

Reads and parses the files in the distribution's RECORD and imports none of them, so the result depends only on the
version of the distribution. Imports only the standard library, because `corpora.py` runs this file as a script, one
process per distribution: a process in which TensorFlow has started threads must not fork.
"""

import ast
import inspect
import json
import re
import sys
import warnings
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

# Tests describe themselves. numpy.distutils is in the wheels for Python 3.11 and not in those for 3.12, and
# _distributor_init.py differs between platforms.
_SKIPPED_FILE = re.compile(
    r"(^|/)(tests?|testing|_vendor|vendored)/|(^|/)(test_[^/]*|[^/]*_test|_distributor_init)\.py$|^numpy/distutils/"
)
_CODE_LINE = re.compile(r"^\s*(>>>|\.\.\. |\$ |#|@|\||\+[-=]+|[-=~^*_]{4,}|\.\. |:\w+|```)")
_HEADING = re.compile(r"(Args|Returns|Raises|Yields|Attributes|Example)s?:")
_SENTENCE_END = re.compile(r"""[.!?]["')\]`]*$""")
_NAMED = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_MIN_CHARACTERS, _MIN_WORDS, _MIN_SHARE_OF_LETTERS = 40, 7, 0.80


def read_distribution(name: str) -> list[dict]:
    """Returns the prose of one distribution, in the order of its file names and of the lines in each file.

    Args:
        name: str. Name of an installed distribution, for example "scikit-learn".

    Returns: list of `{"object": "numpy/linalg/_linalg.py::norm", "paragraphs": [str, ...]}`, one per docstring that
        holds prose.

    Raises:
        PackageNotFoundError: the distribution is not installed.
    """
    warnings.simplefilter("ignore")  # invalid escapes in other people's strings
    documents = []
    for file, source in read_files(name):
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError):  # edited: the digest of the distribution will show it
            continue
        for name_in_file, docstring in _docstrings(tree):
            if paragraphs := prose_paragraphs(docstring):
                documents.append({"object": f"{file}::{name_in_file}", "paragraphs": paragraphs})
    return documents


def read_files(name: str) -> Iterator[tuple[str, str]]:
    """Yields the name and the text of each Python file of a distribution except tests, sorted by name.

    Args and raises: see `read_distribution`.
    """
    distribution = metadata.distribution(name)
    for file in sorted(map(str, distribution.files or ())):
        if file.endswith(".py") and not file.startswith("..") and not _SKIPPED_FILE.search(file):
            try:
                yield file, Path(str(distribution.locate_file(file))).read_text(encoding="utf-8")
            except (OSError, ValueError):  # deleted or edited: the digest of the distribution will show it
                continue


def prose_paragraphs(docstring: str) -> list[str]:
    """Returns the paragraphs of a docstring that are English sentences, each on one line: no code, no tables."""
    paragraphs = []
    for block in re.split(r"\n\s*\n", inspect.cleandoc(docstring)):
        lines = block.split("\n")
        if lines[0].startswith((" ", "\t")) or any(_CODE_LINE.match(line) for line in lines):
            continue
        text = re.sub(r"\s+", " ", block).strip()
        if _is_prose(text):
            paragraphs.append(text)
    return paragraphs


def _is_prose(text: str) -> bool:
    if len(text) < _MIN_CHARACTERS or not text[0].isupper() or not _SENTENCE_END.search(text) or _HEADING.match(text):
        return False
    letters = sum(character.isalpha() or character == " " for character in text)
    return letters >= _MIN_SHARE_OF_LETTERS * len(text) and len(text.split()) >= _MIN_WORDS


def _docstrings(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yields (qualified name, docstring) of the module, with the name "", and of its classes and functions."""
    stack: list[tuple[ast.AST, str]] = [(tree, "")]
    while stack:
        node, name = stack.pop()
        if isinstance(node, (ast.Module, *_NAMED)) and (docstring := ast.get_docstring(node, clean=False)):
            yield name, docstring
        for child in reversed(list(ast.iter_child_nodes(node))):
            if isinstance(child, _NAMED):
                stack.append((child, f"{name}.{child.name}".lstrip(".")))
            elif isinstance(child, (ast.stmt, ast.excepthandler, ast.match_case)):  # expressions hold no docstrings
                stack.append((child, name))


if __name__ == "__main__":
    json.dump(read_distribution(sys.argv[1]), sys.stdout)
