import pathlib

import pytest

from switch_tf import data
from switch_tf.configs import gin_syntax
from switch_tf.tasks import preprocessors

FILES = sorted((pathlib.Path(__file__).resolve().parents[2] / "gin" / "tasks").glob("*.gin"))
# They name their task when they are asked for it, with the files of a user: text_files_test.py.
OWN = {"text_files", "text_to_text_files"}


@pytest.fixture
def macros(request):
    """Parses one file and returns the macros that it defines."""
    return gin_syntax.read([str(request.param)]).check_names().macros


@pytest.mark.parametrize("macros", [file for file in FILES if file.stem not in OWN], ids=lambda file: file.stem,
                         indirect=True)
def test_a_task_file_names_a_registered_task_and_usable_lengths(macros):
    assert set(macros) == {"MIXTURE_OR_TASK_NAME", "TASK_FEATURE_LENGTHS"}
    name, lengths = macros["MIXTURE_OR_TASK_NAME"], macros["TASK_FEATURE_LENGTHS"]
    data.check_task(name)
    if name.endswith("masked_tokens"):
        assert lengths["inputs"] == lengths["targets"]
    elif "span_corruption" in name:
        preprocessors.check_span_corruption(lengths)
        with pytest.raises(ValueError):  # no token of the targets is wasted
            preprocessors.check_span_corruption(lengths | {"targets": lengths["targets"] - 1})


def test_the_names_are_those_that_users_rely_on():
    names = (
        "anli arc c4 closed_book_qa docs_corpus docs_corpus_bytes docs_corpus_library docs_corpus_masked_tokens "
        "docs_corpus_module docs_corpus_summary glue mc4 multi_task random_facts source_corpus squad summarization "
        "super_glue text_files text_to_text_files translation winogrande"
    )
    assert " ".join(file.stem for file in FILES) == names
