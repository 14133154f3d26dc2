"""Commands remove what their own names say, and never through a link."""

import json

import pytest

from switch_tf.data import cache_files, cache_writing
from switch_tf.refusals import Refusal
from switch_tf.storage import whole_file
from switch_tf.storage.resumable_folder import resumable_folder
from switch_tf.surgery import predictions

OTHERS = (".env", ".gitignore", ".cache", ".notes.unfinished")
REQUEST = {"task_feature_lengths": {"targets": 4}, "top_k": 2, "vocab_size": 16, "teacher": "a", "temperature": 1.0,
           "teacher_capacity_factor": None, "vocabulary": ["b"], "pack": False}


@pytest.mark.parametrize("overwrite", [False, True])
def test_what_is_hidden_beside_stored_predictions_stays(tmp_path, overwrite):
    for name in (*OTHERS, ".00000.array_record.0123abcd.unfinished"):
        (tmp_path / name).write_text(name)
    predictions.PredictionWriter(tmp_path, REQUEST, overwrite)
    (tmp_path / "00007.keys").write_text("of a shard that was not finished")
    predictions.PredictionWriter(tmp_path, REQUEST, overwrite)
    assert {file.name for file in tmp_path.iterdir()} == {*OTHERS, predictions.MANIFEST}


def test_what_is_beside_the_shards_of_a_cache_stays(tmp_path):
    for name in (*OTHERS, "notes.txt", "00000-of-00002.json", ".00000-of-00002.array_record.0123abcd.unfinished"):
        (tmp_path / name).write_text("{}")
    cache_files.begin(tmp_path, "request.json", {"task": "a"}, cache_writing._OWN, True)
    assert {file.name for file in tmp_path.iterdir()} == {
        *OTHERS, "notes.txt", "request.json", ".00000-of-00002.array_record.0123abcd.unfinished"}
    assert json.loads((tmp_path / "request.json").read_text()) == {"task": "a"}


@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_damaged_request_is_a_sentence(tmp_path, content):
    (tmp_path / "request.json").write_text(content)
    with pytest.raises(Refusal, match="is of something else: request.json is damaged. Give --overwrite to make it"):
        cache_files.begin(tmp_path, "request.json", {"task": "a"}, cache_writing._OWN, False)


@pytest.mark.parametrize("link", [".out.unfinished", ".out.unfinished/folder", ".out.unfinished/aside"])
def test_unfinished_work_is_not_continued_through_a_link(tmp_path, link):
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "thesis.tex").write_text("of years")
    place = tmp_path / link
    place.parent.mkdir(exist_ok=True)
    place.symlink_to(theirs)
    with pytest.raises(Refusal, match=rf"{link} is a link, .*; remove that link, or name another folder"), \
            resumable_folder(tmp_path / "out", "marker", {"source": "a"}):
        raise AssertionError("It began.")
    assert [file.name for file in theirs.iterdir()] == ["thesis.tex"]


def test_a_tree_is_removed_without_what_its_links_lead_to(tmp_path):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "thesis.tex").write_text("of years")
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "link").symlink_to(tmp_path / "theirs")
    whole_file.remove_tree(tmp_path / "own")
    assert [file.name for file in tmp_path.rglob("*")] == ["theirs", "thesis.tex"]


@pytest.mark.parametrize("record", ["no json\n", "[1]\n", '{"source": "a"}\n{\n'])
def test_a_damaged_record_of_unfinished_work_is_a_sentence(tmp_path, record):
    (tmp_path / ".out.unfinished").mkdir()
    (tmp_path / ".out.unfinished" / "record.jsonl").write_text(record)
    with pytest.raises(Refusal, match=r"record.jsonl is damaged, .*; remove .*unfinished to begin anew"), \
            resumable_folder(tmp_path / "out", "marker", {"source": "a"}):
        raise AssertionError("It began.")
