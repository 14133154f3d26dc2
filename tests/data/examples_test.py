"""Data that yield nothing or cannot be read are refused before a run waits for them."""

import pytest
import seqio
import tensorflow as tf

from switch_tf import data
from switch_tf.tasks import preprocessors, vocabularies

LENGTHS = {"inputs": 64, "targets": 64}
PLAIN = {key: seqio.Feature(vocabularies.byte(), add_eos=True) for key in ("inputs", "targets")}


def _lines(file):
    return tf.data.TextLineDataset(file).map(lambda line: {"text": line})


def _drop_all(dataset):
    return dataset.filter(lambda example: False)


def _divide(dataset):
    raise ZeroDivisionError("no text can be divided")


def _pairs(file):
    return tf.data.TextLineDataset(file).map(lambda line: {"inputs": line, "targets": line})


@pytest.fixture
def add(tmp_path):
    """A function from the content of a file to the name of a task that reads it; what is registered goes again."""
    before = set(seqio.TaskRegistry.names()), set(seqio.MixtureRegistry.names())

    def add(name, content, reader=_pairs, steps=(seqio.preprocessors.tokenize,), validation=None):
        files = {}
        for split, text in (("train", content), ("validation", content if validation is None else validation)):
            (tmp_path / f"{name}_{split}").write_text(text)
            files[split] = str(tmp_path / f"{name}_{split}")
        seqio.TaskRegistry.add(name, source=seqio.FileDataSource(reader, files), preprocessors=list(steps),
                               output_features=PLAIN)
        return name

    yield add
    for registry, names in zip((seqio.TaskRegistry, seqio.MixtureRegistry), before, strict=True):
        for name in set(registry.names()) - names:
            registry.remove(name)


def _refusal(name, split="train"):
    with pytest.raises(ValueError) as raised:
        data.check_examples(data.DatasetDescription(name, LENGTHS, 2, split))
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_data_that_yield_an_example_are_fine(add):
    for split in ("train", "validation"):
        data.check_examples(data.DatasetDescription(add(f"fine_{split}", "a line\n" * 2), LENGTHS, 2, split))


def test_a_file_that_fills_no_batch_is_refused_and_is_enough_where_it_is_read_once(add):
    short = add("short", "one short line\n", _lines, preprocessors.pretraining(preprocessors.span_corruption))
    assert _refusal(short) == (
        "Split 'train' of 'short' yields 1 of the 2 sequences of a batch, read once: it has too little text for "
        "{'inputs': 64, 'targets': 64}, or a preprocessor drops what there is. Give it more, or use a smaller "
        "BATCH_SIZE.")
    data.check_examples(data.DatasetDescription(short, LENGTHS, 2, "validation"))


@pytest.mark.parametrize("split", ["train", "validation"])
def test_an_empty_file_and_a_preprocessor_that_drops_all_yield_nothing(add, split):
    for name, content, steps in (("empty", "", ()), ("dropped", "a line\n", (_drop_all,))):
        assert f"Split {split!r} of {name!r} yields no example" in _refusal(
            add(name, content, steps=(seqio.preprocessors.tokenize, *steps)), split)


def test_an_empty_member_of_a_mixture_is_named_and_none_is_needed_where_data_are_read_once(add):
    seqio.MixtureRegistry.add("some", [add("full", "a line\n"), add("void", "")], default_rate=1)
    assert "Split 'train' of 'void' yields no example" in _refusal("some")
    data.check_examples(data.DatasetDescription("some", LENGTHS, 2, "validation"))
    seqio.MixtureRegistry.add("none", ["void", add("hollow", "")], default_rate=1)
    assert "Split 'validation' of 'hollow' and 'void' yields no example" in _refusal("none", "validation")


def test_a_record_without_text_is_told(add):
    task = add("textless", "a line\n", _pairs, preprocessors.pretraining(preprocessors.span_corruption))
    assert _refusal(task) == "Task 'textless', split 'train', cannot be read (a record has no 'text')."


def test_a_preprocessor_that_fails_is_told_with_its_line(add):
    assert _refusal(add("failing", "a line\n", steps=(_divide,))).startswith(
        f"Task 'failing', split 'train', cannot be read (ZeroDivisionError: no text can be divided at {__file__}:")


def test_files_that_are_not_there_or_hold_no_records_are_told(add, tmp_path):
    task = add("gone", "a line\n")
    (tmp_path / "gone_train").unlink()
    assert _refusal(task).startswith("Task 'gone', split 'train', cannot be read (NotFoundError: ")
    records = add("records", "no record\n" * 9, lambda file: tf.data.TFRecordDataset(file).map(lambda line: {
        "inputs": line, "targets": line}))
    assert _refusal(records).startswith("Task 'records', split 'train', cannot be read (DataLossError: ")
