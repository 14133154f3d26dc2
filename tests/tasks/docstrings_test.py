import json
import subprocess
import sys

from switch_tf.tasks import docstrings


def test_only_paragraphs_of_sentences_are_prose():
    docstring = """Returns the eigenvalues of a square matrix, in no order.

    >>> eigenvalues(matrix)
    This line stands beside code, so its paragraph is not taken.

    Args:
        matrix: the matrix to decompose, of shape n by n and real.

    Short sentence.

    The matrix may be singular; then one
    of the eigenvalues is zero.
    """
    assert docstrings.prose_paragraphs(docstring) == [
        "Returns the eigenvalues of a square matrix, in no order.",
        "The matrix may be singular; then one of the eigenvalues is zero.",
    ]


def test_a_distribution_is_read_in_the_same_order_by_every_process():
    documents = docstrings.read_distribution("gin-config")
    objects = [document["object"] for document in documents]
    files = [name.partition("::")[0] for name in objects]
    assert files == sorted(files)
    assert "gin/config.py::configurable" in objects  # a function
    assert "gin/config.py::" in objects  # the module
    assert not any(file.endswith("_test.py") for file in files)
    command = [sys.executable, "-P", docstrings.__file__, "gin-config"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert objects == [document["object"] for document in json.loads(printed)]


def test_reading_needs_only_the_standard_library():
    code = f"import runpy, sys; runpy.run_path({docstrings.__file__!r}); print('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "False\n"
