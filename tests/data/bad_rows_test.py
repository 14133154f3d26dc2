"""A row for which a preprocessor fails is named with its cause, wherever it is read."""

import dataclasses

import pytest
import seqio
import tensorflow as tf

from switch_tf import data
from switch_tf.data.pipeline import bad_row, refusing_bad_rows
from switch_tf.refusals import Refusal
from switch_tf.tasks import vocabularies

BAD = 270
CAUSES = {"strings": "StringToNumberOp could not correctly convert string: seven",
          "python": "ValueError: invalid literal for int() with base 10: b'seven'"}


def _rows(split, shuffle_files=False, seed=None):
    numbers = [str(index) if index != BAD else "seven" for index in range(300)]
    return tf.data.Dataset.from_tensor_slices({"number": numbers})


def _in_tensorflow(dataset):
    return dataset.map(lambda row: {"inputs": row["number"],
                                    "targets": tf.strings.as_string(tf.strings.to_number(row["number"]))})


def _in_python(dataset):
    def call(number):
        return str(int(number.numpy()))

    return dataset.map(lambda row: {"inputs": row["number"], "targets": tf.ensure_shape(
        tf.py_function(call, [row["number"]], tf.string), [])})


@pytest.fixture(scope="module", autouse=True)
def _tasks():
    features = {name: seqio.Feature(vocabularies.byte()) for name in ("inputs", "targets")}
    names = {"strings": [_in_tensorflow], "python": [_in_python],
             # Fails for every row but says nothing about one.
             "whole": [_in_tensorflow, lambda dataset: dataset.filter(lambda row: False)]}
    for name, steps in names.items():
        seqio.TaskRegistry.add(f"bad_rows_{name}", source=seqio.FunctionDataSource(_rows, ["train", "validation"]),
                               preprocessors=[*steps, seqio.preprocessors.tokenize], output_features=features)
    seqio.TaskRegistry.add("bad_rows_source", source=seqio.FunctionDataSource(
        lambda split, shuffle_files=False, seed=None: _in_tensorflow(_rows(split)), ["train", "validation"]),
        preprocessors=[seqio.preprocessors.tokenize], output_features=features)
    seqio.MixtureRegistry.add("bad_rows_both", [(f"bad_rows_{name}", 1.0) for name in ("python", "strings")])
    yield
    seqio.MixtureRegistry.remove("bad_rows_both")
    for name in (*names, "source"):
        seqio.TaskRegistry.remove(f"bad_rows_{name}")


def _description(name, split="train", batch_size=2):
    return data.DatasetDescription(f"bad_rows_{name}", {"inputs": 8, "targets": 8}, batch_size, split)


def _error(description):
    with pytest.raises(tf.errors.OpError) as raised:
        list(data.get_dataset(description).take(300))
    return raised.value


@pytest.mark.parametrize(("name", "split"), [("strings", "train"), ("python", "validation")])
def test_the_row_and_the_cause_are_named(name, split):
    description = _description(name, split)
    error = _error(description)
    text = f"row 270 of task 'bad_rows_{name}', split '{split}', {{'number': b'seven'}}: {CAUSES[name]}"
    assert bad_row(description, error) == text
    with pytest.raises(data.BadData) as raised, refusing_bad_rows(description):
        raise error
    assert str(raised.value) == f"Data cannot be read: {text}."


def test_a_source_that_fails_itself_is_named():
    description = _description("source", "validation")
    assert bad_row(description, _error(description)) == (
        f"the source of task 'bad_rows_source', split 'validation', after row 256: {CAUSES['strings']}")


def test_of_a_mixture_it_is_the_first_task_that_fails():
    description = _description("both")
    assert "task 'bad_rows_python'" in bad_row(description, _error(description))


def test_a_row_at_the_beginning_is_refused_before_the_run_starts():
    with pytest.raises(Refusal, match="^Data cannot be read: row 270 of task 'bad_rows_strings'"):
        data.check_examples(_description("strings", batch_size=300))


def test_what_is_no_error_of_a_row_is_left_as_it_is(monkeypatch):
    description = _description("strings")
    error = _error(description)
    lost = tf.errors.UnavailableError(None, None, "Connection reset by peer")
    assert bad_row(description, lost) is None
    with pytest.raises(tf.errors.UnavailableError), refusing_bad_rows(description):
        raise lost
    assert bad_row(_description("whole"), error).startswith("row 270")
    monkeypatch.setattr("switch_tf.data.pipeline._SECONDS", 0)
    assert bad_row(description, error) is None
    assert bad_row(dataclasses.replace(description, split="validation"), error) is None
