"""Tasks of text files by a gin file alone; and what a user sees whose files are wrong."""

import gzip
import json

import pytest
import seqio
import tensorflow as tf

from switch_tf import data
from switch_tf.cli import main
from switch_tf.configs.experiment import Experiment
from switch_tf.tasks import docs_corpus, text_files, text_source  # noqa: F401  (registers)

RUN = ["gin/models/switch_tiny.gin", "gin/runs/pretrain.gin"]
BYTES = "VOCABULARY='bytes'"


def _run(task, *bindings):
    return Experiment.from_gin([*RUN, f"gin/tasks/{task}.gin"], ["MODEL_DIR='unused'", *bindings]).run


def _batches(run, split, lengths):
    return data.get_dataset(_description(run, split, lengths)).as_numpy_iterator()


def _description(run, split, lengths):
    return data.DatasetDescription(run.mixture_or_task_name, lengths, 2, split, vocabulary=run.vocabulary)


def _examples(name, split, lengths):
    task = data.vocabularies.get_provider(name, "bytes")
    return list(task.get_dataset(lengths, split, shuffle=False).as_numpy_iterator())


def test_text_of_any_field_is_pretrained_on(tmp_path):
    rows = [{"id": str(number), "body": f"{number} " + "abcdef " * 30} for number in range(60)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = _run("text_files", f"TRAIN_FILES='{tmp_path}/*.jsonl'", "TEXT_FIELD='body'", BYTES)
    assert run.mixture_or_task_name == "text_files" and run.vocabulary == "bytes"
    lengths = {"inputs": 32, "targets": 16}
    tokens = next(_batches(run, "validation", lengths))["encoder_input_tokens"]
    assert tokens.shape == (2, 32) and (tokens == 358).any(axis=1).all()  # the first sentinel of 359 ids
    assert {example["inputs"].max() for example in _examples("text_files", "train", lengths)} == {358}


def test_text_becomes_text_with_prefix_and_metrics_by_name(tmp_path):
    (tmp_path / "train.tsv").write_text("question\tanswer\n1+1\t2\n<extra_id_0>?\tno\n")
    (tmp_path / "held.csv.gz").write_bytes(gzip.compress(b'answer,question\n4,"2, +2"\n'))
    run = _run("text_to_text_files", f"TRAIN_FILES=['{tmp_path}/train.tsv']",
               f"VALIDATION_FILES='{tmp_path}/held.csv.gz'", "INPUT_FIELD='question'", "TARGET_FIELD='answer'",
               "PREFIX='add: '", "METRICS=['accuracy', 'squad']", "text_to_text.name='sums'", BYTES)
    assert run.mixture_or_task_name == "sums"
    lengths = {"inputs": 32, "targets": 16}

    def ids(text):
        return [byte + 3 for byte in text.encode()] + [1]

    found = [(example["inputs"].tolist(), example["targets"].tolist())
             for example in _examples("sums", "train", lengths)]
    assert found == [(ids("add: 1+1"), ids("2")), (ids("add: <extra_id_0>?"), ids("no"))]
    [example] = _examples("sums", "validation", lengths)
    assert example["inputs"].tolist() == ids("add: 2, +2") and example["targets_pretokenized"] == b"4"
    assert [metric.__name__ for metric in seqio.TaskRegistry.get("sums").predict_metric_fns] == ["accuracy", "squad"]


def test_a_name_that_another_task_has_is_refused():
    with pytest.raises(ValueError, match="There is another task of the name 'docs_corpus_span_corruption'"):
        text_files.pretraining("a.txt", name="docs_corpus_span_corruption")
    assert text_files.pretraining("a.txt", name="mine") == text_files.pretraining("b.txt", name="mine") == "mine"


def test_a_run_is_described_without_its_files_so_that_it_can_be_compiled_elsewhere():
    assert _run("text_files", "TRAIN_FILES='nowhere.txt'").mixture_or_task_name == "text_files"


FINE = '{"inputs": "a", "targets": "b"}\n' * 40
# What is wrong -> (name, content, what its user sees of it).
WRONG = {
    "missing": ("gone.jsonl", None, "TRAIN_FILES: there is no file 'gone.jsonl'; a relative path starts where"),
    "folder": ("folder/", None, "TRAIN_FILES: 'folder/' is a folder; name its files, for example"),
    "another kind": ("a.docx", FINE, "'a.docx' ends in none of .txt, .jsonl, .json, .tsv, .csv, with or without .gz"),
    "missing field": ("a.jsonl", FINE + '{"inputs": "a", "target": "b"}\n',
                      "a.jsonl, line 41: it has no field 'targets', only 'inputs', 'target'. Mend it"),
    "missing column": ("a.csv", "inputs,target\na,b\n",
                       "a.csv, line 1: the header has no column 'targets', only 'inputs', 'target'; a table without"),
    "number": ("a.jsonl", FINE + '{"inputs": "a", "targets": 1}\n',
               "a.jsonl, line 41: the field 'targets' must be text, not 1. Mend it"),
    "broken JSON": ("a.jsonl", FINE + '{"inputs": "a", "targets": "b"\n',
                    "a.jsonl, line 41: it is no JSON (Expecting ',' delimiter, column 31)"),
    "no UTF-8": ("a.tsv", b"inputs\ttargets\nna\xefve\tb\n",
                 "a.tsv, line 2: it is not UTF-8 (byte 0xef after 2 others). Mend it"),
    "few columns": ("a.tsv", "inputs\ttargets\na\tb\na\n",
                    "a.tsv, line 3: it has 1 column and needs 2, as the header has. Mend it"),
    "open quote": ("a.csv", 'inputs,targets\na,b\n"a,b\na,b\n',
                   "a.csv, line 3: it is no CSV (unexpected end of data): a quotation mark is not closed"),
    "cut off": ("a.jsonl.gz", gzip.compress(FINE.encode())[:-9], "a.jsonl.gz cannot be read: Compressed file ended"),
    "empty": ("a.jsonl", "", "Split 'train' of 'text_to_text_files' yields no example, read once"),
    "nothing to hold out": ("a.jsonl", FINE, "of 'text_to_text_files' yields no example, read once"),
    "one text a line": ("a.txt", "a\n", "a.txt cannot be read so: it has one text a line, but 2 fields are asked for"),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_files_are_told_in_one_sentence_before_anything_is_built(tmp_path, monkeypatch, capsys, wrong):
    name, content, sentence = WRONG[wrong]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    if content is not None:
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    files = [f"--gin_file={file}" for file in (*RUN, "gin/tasks/text_to_text_files.gin")]
    assert main.main(["train", *files, "--gin.MODEL_DIR='run'", f"--gin.TRAIN_FILES='{name}'", "--gin.BATCH_SIZE=8",
                      f"--gin.{BYTES}"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("switch-tf train: ") and error.count("\n") == 1
    assert sentence in error
    assert not (tmp_path / "run").exists()


def test_what_is_read_while_training_ends_the_command_with_its_sentence(tmp_path, monkeypatch, capsys):
    """As `switch-tf train` does, where TensorFlow passes on what a source says; tests/reliability has the whole run."""
    (tmp_path / "a.jsonl").write_text(FINE + "{}\n")
    monkeypatch.setattr(text_source, "LOOKED_THROUGH", 0)
    run = _run("text_to_text_files", f"TRAIN_FILES='{tmp_path}/a.jsonl'", BYTES)
    batches = _batches(run, "train", {"inputs": 8, "targets": 8})
    from switch_tf.cli import doctor

    def read(arguments):
        with data.refusing_bad_rows(_description(run, "train", {"inputs": 8, "targets": 8})):
            return list(batches)

    monkeypatch.setattr(doctor, "run_doctor", read)
    assert main.main(["doctor"]) == 2
    assert capsys.readouterr().err == (
        f"switch-tf doctor: {tmp_path}/a.jsonl, line 41: it has no field 'inputs', nor any other. Mend it, or raise "
        "max_bad_examples, which is 0.\n")


def test_another_fault_is_not_hidden(monkeypatch):
    from switch_tf.cli import doctor
    monkeypatch.setattr(doctor, "run_doctor",
                        lambda arguments: tf.constant([1]) + tf.constant([1, 2, 3]).numpy()[:2][3])
    with pytest.raises(IndexError):
        main.main(["doctor"])
