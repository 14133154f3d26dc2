"""No command makes a local folder of a URL."""

import pathlib

import pytest

from switch_tf import checks, data
from switch_tf.cli import main
from switch_tf.configs.run import Run

URL = "s3://bucket/x"
RUN = ["--run", "runs/x"]


@pytest.mark.parametrize("words, name", [
    (["eval", *RUN, "--output", URL], "--output"), (["eval", "--run", URL], "--run"),
    (["export", *RUN, f"--output={URL}"], "--output"), (["infer", *RUN, "--output", URL], "--output"),
    (["infer", *RUN, "--input", "s3://b/x.txt"], "--input"), (["serve", "--run", URL], "--run"),
    (["convert", "--input", URL, "--output", "y"], "--input"),
    (["convert", "--input", "y", "--output", URL], "--output"),
    (["upcycle", "--from", URL, "--output", "y"], "--from"),
    (["shrink", "--from", URL, "--num_experts=1", "--output=y"], "--from"),
    (["average", "--run", "y", "--last=2", "--output", URL], "--output"),
    (["cache", "docs_corpus_span_corruption", "--output", URL], "--output"),
    (["vocabulary", "--input", "a.txt", "--size", "9", "--output", URL], "--output"),
    (["inspect", URL], "PRESET"), (["export", *RUN, "--output", "gs:/bucket/x"], "--output"),
    (["compare", "--runs", "a", URL], "--runs"), (["compare", "--runs", "a", "b", "--output", URL], "--output"),
    (["compile", "--topology=v5e:2x2", "--save", URL], "--save"),
    (["compile", "--topology=v5e:2x2", "--plot", URL], "--plot")])
def test_a_url_is_refused_in_one_sentence_and_writes_nothing(words, name, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main.main(words) == 2 and not list(tmp_path.iterdir())
    error = capsys.readouterr().err
    assert error.startswith(f"switch-tf {words[0]}: {name}") and error.count("\n") == 1
    assert "must be a path of this machine or of a bucket, such as gs://bucket/x, not '" in error


@pytest.mark.parametrize("value, reason", [("a" * 5000, "must be shorter, as no file can have the name 'aaa"),
                                           ("runs/x\0", "must be a path, not 'runs/x")])
@pytest.mark.parametrize("words", [["inspect"], ["compare", "--runs", "a"], ["eval", "--run"], ["train", "--gin_file"]])
def test_a_name_that_no_file_can_have_is_refused(words, value, reason, capsys):
    assert main.main([*words, value]) == 2
    error = capsys.readouterr().err
    assert reason in error and error.count("\n") == 1 and len(error) < 500


def test_texts_may_be_wherever_tensorflow_reads_them():
    assert main._parse(["vocabulary", "--input", URL, "--size", "9", "--output", "own.model"]).input == [URL]


@pytest.mark.parametrize("name", ["model_dir", "cache_dir", "initial_checkpoint"])
def test_a_run_takes_paths_and_buckets_and_no_other_url(name):
    values = {"model_dir": "x", "mixture_or_task_name": "y", "task_feature_lengths": {"inputs": 9, "targets": 9},
              "train_steps": 1, "batch_size": 1} | {name: URL}
    with pytest.raises(ValueError, match=f"{name.upper()} must be a path of this machine or of a bucket"):
        Run(**values)
    for right in ("local", "gs://bucket/x"):
        values[name] = right
        Run(**values | {"vocabulary": "gs://t5-data/own.model"})  # which TensorFlow reads


def test_a_cache_at_an_unknown_url_is_refused_as_it_would_seem_empty():
    with pytest.raises(ValueError, match="CACHE_DIR must be a path of this machine or of a bucket"):
        data.DatasetDescription("y", {"inputs": 9, "targets": 9}, 1, "train", use_cached_tasks=True, cache_dir=URL)


def test_a_path_that_was_a_url_is_refused_too():
    for value in (URL, pathlib.Path(URL), pathlib.Path("gs://bucket/x"), "gs:/bucket/x", " s3:/b/x", " gs://b/x", "gs://"):
        with pytest.raises(ValueError, match="folder must be a path of this machine or of a bucket"):
            checks.path("folder", value)
    assert checks.path("folder", "a:b/c") == pathlib.Path("a:b/c")
    assert str(checks.path("folder", "gs://b/x/")) == "gs://b/x"
