"""Commands on paths in a bucket."""

import errno
import json
import os
import subprocess
import sys

import pytest

from switch_tf.cli import main
from switch_tf.configs import gin_syntax
from switch_tf.statuses import OUTAGE, REFUSED
from switch_tf.storage import json_lines, places


def test_gin_files_are_read_and_include_each_other(bucket):
    folder = bucket.new_folder()
    (places.at(folder) / "deep.gin").write_text("SEED = 7\n")
    (places.at(folder) / "run.gin").write_text(f"include '{folder}/deep.gin'\nBATCH_SIZE = 5\n")
    assert gin_syntax.read([f"{folder}/run.gin"]).macros == {"SEED": 7, "BATCH_SIZE": 5}


def test_gin_files_are_looked_for_in_a_folder_of_the_bucket(bucket):
    folder = bucket.new_folder()
    (places.at(folder) / "own.gin").write_text("SEED = 8\n")
    assert gin_syntax.read(["own.gin"], search_paths=folder).macros == {"SEED": 8}


@pytest.mark.parametrize("words", [
    ["eval", "--run", "{}/nothing"], ["infer", "--run", "{}/nothing", "--input", "-"],
    ["export", "--run", "{}/nothing", "--output", "{}/x"], ["serve", "--run", "{}/nothing"],
    ["train", "--gin_file={}/nothing.gin"], ["inspect", "{}/nothing"], ["inspect", "{}/nothing", "--verify"],
    ["infer", "--run", "{}/nothing", "--input", "{}/nothing.txt"],
    ["convert", "--input", "{}/nothing", "--output", "x"],
    ["upcycle", "--from", "{}/nothing", "--output", "x"],
    ["shrink", "--from", "{}/nothing", "--num_experts=1", "--output", "x"],
    ["average", "--run", "{}/nothing", "--last=2", "--output", "{}/x"],
    ["compare", "--runs", "{}/nothing", "{}/nowhere", "--output", "{}/x"],
    ["export", "--model", "{}/nothing.keras", "--output", "{}/x"],
    ["cache", "docs_corpus_span_corruption", "--output", "gs:/x"], ["eval", "--run", "az://b/x"]])
def test_what_is_not_there_is_refused_in_one_sentence_and_nothing_is_written(words, bucket, capsys, tmp_path,
                                                                             monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = bucket.new_folder()
    assert main.main([word.format(folder) for word in words]) == REFUSED
    error = capsys.readouterr().err
    assert error.startswith(f"switch-tf {words[0]}: ") and error.count("\n") == 1, error
    assert not list(tmp_path.iterdir()) and not places.at(folder).exists()


@pytest.mark.slow  # imports TensorFlow
def test_a_mistake_in_a_process_of_its_own_is_one_sentence_below_the_import(bucket):
    """Before the command imports TensorFlow without its lines, the path has imported it."""
    place = f"{bucket.new_folder()}/nothing"
    done = subprocess.run([sys.executable, "-m", "switch_tf.cli", "inspect", place], capture_output=True, text=True,
                          env={name: value for name, value in os.environ.items() if name != "TF_CPP_MIN_LOG_LEVEL"})
    assert (done.returncode, done.stderr) == (
        REFUSED, f"Importing TensorFlow ...\nswitch-tf inspect: There is no folder {place!r} here.\n")


@pytest.mark.parametrize("number, status", [(errno.EIO, OUTAGE), (errno.EACCES, REFUSED)])
def test_a_bucket_that_fails_is_one_sentence_and_an_outage(number, status, bucket, capsys, monkeypatch):
    def fail(self):
        raise places.BucketError(number, "Error executing an HTTP request: 503", "gs://b/x")

    monkeypatch.setattr(type(places.at("gs://b/x")), "is_file", fail)
    assert main.main(["eval", "--run", "gs://b/x"]) == status
    assert capsys.readouterr().err == (
        "switch-tf eval: gs://b/x cannot be reached (Error executing an HTTP request: 503); check its name, your "
        "rights and the network, then start the same command again.\n")


def test_scores_grow_in_a_bucket(bucket):
    file = places.at(bucket.new_folder()) / "scores.jsonl"
    json_lines.append(file, [{"step": 1}])
    json_lines.append(file, [{"step": 2}])
    assert [json.loads(line)["step"] for line in file.read_text().splitlines()] == [1, 2]
