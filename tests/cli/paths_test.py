"""No command makes a local folder of a URL."""

import pathlib

import pytest

from switch_tf import checks, data
from switch_tf.cli import main
from switch_tf.configs.run import Run

URL = "s3://bucket/x"


@pytest.mark.parametrize("url", [URL, "gs:/bucket/x"])
@pytest.mark.parametrize("line", [
    "eval --run=y --output", "eval --run", "export --run=y --output", "infer --run=y --output", "infer --run=y --input",
    "serve --run", "convert --output=y --input", "convert --input=y --output", "upcycle --output=y --from",
    "shrink --num_experts=1 --output=y --from", "average --run=y --last=2 --output", "inspect",
    "cache docs_corpus_span_corruption --output", "vocabulary --input=a.txt --size=9 --output", "compare --runs a",
    "compare --runs a b --output", "compile --topology=v5e:2x2 --save", "compile --topology=v5e:2x2 --plot"])
def test_a_url_is_refused_in_one_sentence_and_writes_nothing(line, url, refused):
    name = line.rpartition(" --")[2].removesuffix(" a")  # of the last flag
    told = refused(line, url)
    assert told.startswith((f"switch-tf {line.split()[0]}: --{name}", "switch-tf inspect: PRESET"))
    assert "must be a path of this machine or of a bucket, such as gs://bucket/x, not '" in told


@pytest.mark.parametrize("value, reason", [("a" * 5000, "must be shorter, as no file can have the name 'aaa"),
                                           ("runs/x\0", "must be a path, not 'runs/x")])
@pytest.mark.parametrize("line", ["inspect", "compare --runs a", "eval --run", "train --gin_file"])
def test_a_name_that_no_file_can_have_is_refused(line, value, reason, refused):
    told = refused(line, value)
    assert reason in told and len(told) < 500


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
