"""One reading of text: what training reads, evaluation, infer, serve and an exported program read too."""

import functools
import json

import numpy as np
import pytest
import seqio
import tensorflow as tf

from switch_tf import data
from switch_tf.inference import exporting
from switch_tf.inference.server import Hosts, Server
from switch_tf.inference.text_model import TextModel
from switch_tf.tasks import (  # noqa: F401  (registers)
    docs_corpus,
    docs_corpus_supervised,
    preprocessors,
    sentinels,
    text_files,
    vocabularies,
)

LENGTHS = {"inputs": 16, "targets": 8}
ODD = [
    "plain words of text", " a blank before", "and after ", "two  blanks", "    four blanks", "a\ttab",
    "tab\tat\tthe\tend\t", "no-break\u00a0blank", "\u3000wide blank",
    "full-width \uff21\uff22\uff23 \uff1cextra_id_0\uff1e", "zero\u200bwidth", "<extra\u200b_id_0>", "\ufeffa mark",
    "joined\u200d\u2764\ufe0f", "\U0001f600 emoji \U0001f468\u200d\U0001f469", "combining e\u0301 and \u00e9",
    "\u4e2d\u6587\u6587\u672c", "\u0627\u0644\u0639\u0631\u0628\u064a\u0629", "ligature \ufb01 and \u00bd",
    "control\x07bell", "nul\0byte", "quote \" and \\ and ' and `", "</s> <pad> <unk> <s>", "<extra_id_0>",
    "a <extra_id_0> b", "un<extra_id_1>able", "<extra_id_0>. Hello", "(<extra_id_5>)",
    "<extra_id_0><extra_id_1> <extra_id_2>", "<extra_id_99> last", "<extra_id_100> beyond", "<extra_id_007>",
    "<extra_id_> none", "line\nends\nwithin", "x = <extra_id_0>\n    y", "label: typed by hand", "a" * 80,
    "words that are cut at the end of what the model reads because there are many more of them",
    "cut in the name of a sentinel so that it is not whole any more <extra_id_0> <extra_id_1>",
    "\u2028line\u2029para",
]  # fmt: skip
VOCABULARIES = ["docs_corpus", "source_corpus", "bytes"]


@pytest.fixture
def serve(make_model):
    """A function of a Reading to a TextModel and its Server; the model is never asked."""
    def make(reading):
        text_model = TextModel(make_model(vocab_size=4224), reading, LENGTHS["inputs"], LENGTHS["targets"])
        return text_model, Server(text_model, "test", {}, 32, 256, 2**20, Hosts())

    return make


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_the_same_lines_have_the_same_ids_everywhere(tmp_path, serve, vocabulary):
    assert len(ODD) == 40
    rows = "".join(json.dumps({"question": text, "answer": "yes <extra_id_3>"}) + "\n" for text in ODD)
    (tmp_path / "rows.jsonl").write_text(rows)
    name = text_files.text_to_text(str(tmp_path / "rows.jsonl"), str(tmp_path / "rows.jsonl"), "question", "answer",
                                   prefix="label: <extra_id_4> ", metrics=["accuracy"])
    description = data.DatasetDescription(name, LENGTHS, 4, "validation", vocabulary=vocabulary)
    task = data.vocabularies.get_provider(name, vocabulary)
    trained = list(task.get_dataset(LENGTHS, "train", shuffle=False).as_numpy_iterator())
    expected = [example["inputs"].tolist() for example in trained]
    reading = data.reading_of(name, vocabulary)
    assert (reading.prefix, reading.sentinels, reading.fields) == (
        "label: <extra_id_4> ", "spelt_out", ("question", "answer"))

    evaluated = []

    def predict(features):
        evaluated.extend([id_ for id_ in row.tolist() if id_] for row in features["encoder_input_tokens"])
        return np.ones((4, 1), "int32")

    data.Evaluator(description).evaluate(predict, None)
    text_model, server = serve(reading)
    examples = [one.texts for one in data.TextFile(str(tmp_path / "rows.jsonl"), reading.fields).examples()]
    program = tf.function(exporting._Answerer(text_model).read, autograph=False)
    found = {
        "evaluated": evaluated[:len(ODD)], "inferred": [text_model.read(text).ids for text, _ in examples],
        "served": [server._inputs("instance", text).ids for text in ODD],
        "exported": [[id_ for id_ in row if id_] for row in program(tf.constant(ODD)).numpy().tolist()]}
    for where, ids in found.items():
        assert ids == expected, (where, [text for text, a, b in zip(ODD, ids, expected, strict=True) if a != b])
    assert {text_model.read_target(target).ids == one["targets"].tolist()
            for (_, target), one in zip(examples, trained, strict=True)} == {True}


def test_raw_is_text_as_it_is():
    vocabulary = vocabularies.docs_corpus()
    reading = data.Reading(vocabulary, vocabulary, prefix="label: ", sentinels="spelt_out")
    assert reading.raw().read("a <extra_id_0>", 9)[0] == [*vocabulary.encode("a"), 4095, 1]
    assert reading.read("a", 9)[0] == [*vocabulary.encode("label: a"), 1]
    assert reading.read("", 9)[0] == [*vocabulary.encode("label:"), 1] and reading.raw().read("", 9) == ([], 0)


@pytest.mark.parametrize("length", [1, 2, 5])
def test_the_end_of_a_long_text_is_kept_where_training_keeps_it(length):
    vocabulary = vocabularies.byte()
    features = {"inputs": seqio.Feature(vocabulary, add_eos=True)}
    for step, keeps_end in ((seqio.preprocessors.append_eos, False),
                            (seqio.preprocessors.append_eos_after_trim, True)):
        task = seqio.Task("cut", seqio.FunctionDataSource(lambda split, shuffle_files, seed=None: (
            tf.data.Dataset.from_tensors({"inputs": "abcde"})), ["train"]), features,
            [seqio.preprocessors.tokenize, step])
        [example] = task.get_dataset({"inputs": length}, "train", shuffle=False).as_numpy_iterator()
        assert data.reading._conventions(task)["keeps_end"] is keeps_end
        reading = data.Reading(vocabulary, vocabulary, keeps_end=keeps_end)
        assert reading.read("abcde", length) == (example["inputs"].tolist(), 6 - length)


TASKS = {"docs_corpus_span_corruption": "gaps", "docs_corpus_masked_tokens": "gaps", "docs_corpus_library": "spelt_out",
         "docs_corpus_module": "spelt_out"}


@pytest.mark.parametrize("name", TASKS)
def test_a_task_declares_what_typed_sentinels_are(name):
    reading = data.reading_of(name)
    assert (reading.sentinels, reading.prefix, reading.keeps_end) == (TASKS[name], "", True)


@pytest.fixture
def add_task():
    """A function that registers a task with some steps."""
    added = []

    def add(name, *steps, prefix=""):
        source = seqio.FunctionDataSource(lambda split, shuffle_files, seed=None: (
            tf.data.Dataset.from_tensors({"inputs": prefix + "a <extra_id_0> b", "targets": "c"})), ["train"])
        source.prefix, source.fields = prefix, ["not those of a file"]
        seqio.TaskRegistry.add(name, source, preprocessors.output_features(vocabularies.docs_corpus()), list(steps))
        added.append(name)

    yield add
    for name in added:
        seqio.TaskRegistry.remove(name)


def test_a_task_that_declares_nothing_reads_as_its_vocabulary_does(add_task):
    add_task("undeclared", seqio.preprocessors.tokenize, seqio.preprocessors.append_eos_after_trim)
    task = seqio.TaskRegistry.get("undeclared")
    [example] = task.get_dataset(LENGTHS, "train", shuffle=False).as_numpy_iterator()
    reading = data.reading_of("undeclared")
    assert reading.sentinels == "as_tokenized" and 4095 in example["inputs"]
    assert reading.read("a <extra_id_0> b", 16)[0] == example["inputs"].tolist()


def _own_end(dataset, output_features):
    return seqio.preprocessors.append_eos(dataset, output_features)


@pytest.mark.parametrize("steps", [
    [seqio.preprocessors.tokenize], [seqio.preprocessors.tokenize_and_append_eos],
    [functools.partial(seqio.preprocessors.tokenize, with_eos=True)], [seqio.preprocessors.tokenize, _own_end]],
    ids=["none", "joint", "with_eos", "own"])
def test_an_end_follows_where_a_step_of_the_task_appends_it(add_task, steps):
    add_task("ends", *steps)
    reading, task = data.reading_of("ends"), seqio.TaskRegistry.get("ends")
    lengths = (16,) if steps[-1] is _own_end else (2, 16)  # an unknown step may trim first
    for length in lengths:
        [example] = task.get_dataset({"inputs": length, "targets": 8}, "train", shuffle=False).as_numpy_iterator()
        assert reading.read("a <extra_id_0> b", length)[0] == example["inputs"].tolist()
        assert reading.read_target("c", 8)[0] == example["targets"].tolist()


def test_a_mixture_has_what_its_tasks_agree_on_and_a_note_where_they_differ(add_task, capsys):
    steps = [seqio.preprocessors.tokenize, sentinels.spell_out]
    for name, prefix in (("one", "a: "), ("same", "a: "), ("other", "b: ")):
        add_task(name, *steps, prefix=prefix)
    add_task("gaps", *steps, preprocessors.span_corruption, prefix="a: ")
    expected = {("one", "same"): ("a: ", "spelt_out"), ("one", "other"): ("", "spelt_out"),
                ("one", "gaps"): ("a: ", "gaps"), ("other", "gaps"): ("", "gaps")}
    for tasks, found in expected.items():
        seqio.MixtureRegistry.add("mixed", list(tasks), default_rate=1)
        try:
            reading = data.reading_of("mixed")
        finally:
            seqio.MixtureRegistry.remove("mixed")
        assert (reading.prefix, reading.sentinels) == found
        note = capsys.readouterr().err
        assert note.count("\n") == (tasks != ("one", "same"))
    assert "The tasks of 'mixed' have different prefixes and readings of <extra_id_0>" in note


def test_it_is_kept_as_data():
    vocabulary = vocabularies.byte()
    reading = data.Reading(vocabulary, vocabulary, False, True, "a: ", "spelt_out", False, ("x", 3))
    kept = json.loads(json.dumps(reading.as_data()))
    assert data.Reading.from_data(kept, vocabulary, vocabulary) == reading
    for change, message in (
            ({"prefix": 3}, "The prefix must be text, not 3"), ({"prefix": "\ud800"}, "The prefix must be text, not "),
            ({"sentinels": "x"}, "sentinels must be one of 'gaps', "),
            ({"inputs_end": 1}, "inputs_end must be True or False, not 1"), ({"more": 1}, "must have the keys"),
            ({"fields": ["a"]}, "fields must be two names or numbers of columns"),
            ({"fields": ["a", -1]}, "fields must be two names"), ({"fields": "ab"}, "fields must be two names")):
        with pytest.raises(ValueError, match=message):
            data.Reading.from_data({**kept, **change}, vocabulary, vocabulary)
    with pytest.raises(ValueError, match="must have the keys"):
        data.Reading.from_data([], vocabulary, vocabulary)
    with pytest.raises(ValueError, match="typed_sentinels of a preprocessor must be one of 'gaps', .* not 'x'"):
        data.typed_sentinels("x")
