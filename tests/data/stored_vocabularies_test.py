"""Vocabularies in a run folder: the same ids from the copy, and what else may lie there."""

import os
import shutil

import pytest
import seqio

from switch_tf import data
from switch_tf.data import vocabularies
from switch_tf.data.vocabularies import Stored
from switch_tf.tasks import vocabularies as registered

TEXT = "The router sends each token to one expert."


def test_a_copy_gives_the_same_ids_wherever_the_folder_is(tmp_path):
    own = registered.docs_corpus()
    stored = vocabularies.store(own, tmp_path, "inputs")
    assert stored[:5] == ("sentencepiece", "docs_corpus", 4096, 100, "vocabulary/inputs.model")
    moved = shutil.copytree(tmp_path, tmp_path.parent / "moved")
    shutil.rmtree(tmp_path)
    loaded = vocabularies.load(Stored.from_data(stored._asdict()), moved)
    assert loaded.encode(TEXT) == own.encode(TEXT) and loaded.vocab_size == 4096
    assert vocabularies.load(stored, moved) is loaded
    choice = vocabularies.choice_of(stored, moved)
    assert data.get_vocabulary(choice).encode(TEXT) == own.encode(TEXT)


def test_bytes_need_no_file_and_code_cannot_be_stored(tmp_path):
    stored = vocabularies.store(registered.byte(), tmp_path, "inputs")
    assert stored == Stored("bytes", "bytes", 359, 100)
    assert vocabularies.load(stored, tmp_path) == registered.byte()
    assert vocabularies.choice_of(stored, tmp_path) == "bytes"
    other = vocabularies.store(seqio.PassThroughVocabulary(50), tmp_path, "inputs")
    assert other == Stored("other", "PassThroughVocabulary", 50)
    assert vocabularies.choice_of(other, tmp_path) is None
    with pytest.raises(ValueError, match="is made by code"):
        vocabularies.load(other, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_file_out_of_reach_is_told(tmp_path):
    with pytest.raises(vocabularies.Unreadable, match="nowhere.model could not be copied into"):
        vocabularies.store(seqio.SentencePieceVocabulary(f"{tmp_path}/nowhere.model", 100), tmp_path, "inputs")


def _link_to_file(path, outside):
    outside.write_bytes(path.read_bytes())
    path.unlink()
    path.symlink_to(outside)


def _link_to_folder(path, outside):
    path.parent.rename(outside)
    path.parent.symlink_to(outside)


@pytest.mark.parametrize("damage, message", [
    (lambda path, outside: path.write_bytes(path.read_bytes() + b"\n"), "its SHA-256 differs"),
    (lambda path, outside: path.unlink(), r"cannot be read \(No such file or directory\); copy it"),
    (lambda path, outside: (path.unlink(), path.mkdir()), r"cannot be read \(it is no file\); copy it"),
    (lambda path, outside: (path.unlink(), os.mkfifo(path)), r"cannot be read \(it is no file\); copy it"),
    (lambda path, outside: os.truncate(path, 2**40), "larger than 268435456 bytes.; copy it"),
    (_link_to_file, "is no link"), (_link_to_folder, "is no link")])
def test_a_copy_that_is_not_the_runs_is_one_sentence(tmp_path, damage, message):
    stored = vocabularies.store(registered.docs_corpus(), tmp_path, "inputs")
    damage(tmp_path / stored.file, tmp_path.parent / f"{tmp_path.name}_outside")
    with pytest.raises(ValueError, match=message):
        vocabularies.load(stored, tmp_path)


@pytest.mark.parametrize("file", ["../../etc/passwd", "/etc/passwd", "vocabulary/../../x", "vocabulary/..",
                                  "vocabulary", "", "checkpoints/x", "vocabulary/a\0b"])
def test_a_path_out_of_the_run_is_refused(tmp_path, file):
    with pytest.raises(ValueError, match="must name a file in the folder 'vocabulary'|has a file and its sha256"):
        vocabularies.load(Stored.from_data(
            {"kind": "sentencepiece", "name": "x", "size": 9, "file": file, "sha256": "0"}), tmp_path)


@pytest.mark.parametrize("wrong", [
    None, [], "docs_corpus", {}, {"kind": "bytes"}, {"kind": "bytes", "name": "b", "size": 9, "more": 1},
    {"kind": "pickle", "name": "b", "size": 9}, {"kind": ["bytes"], "name": "b", "size": 9},
    {"kind": "bytes", "name": 3, "size": 9}, {"kind": "bytes", "name": "b", "size": True},
    {"kind": "bytes", "name": "b", "size": 2**31}, {"kind": "bytes", "name": "b", "size": 9, "extra_ids": -1},
    {"kind": "bytes", "name": "b", "size": 2**31 - 1, "extra_ids": 2**31 - 1},
    {"kind": "bytes", "name": "b", "size": 9, "file": "vocabulary/x"},
    {"kind": "bytes", "name": "b", "size": 9, "file": []}, {"kind": "other", "name": "b", "size": 9, "sha256": {}},
    {"kind": "sentencepiece", "name": "b", "size": 9},
    {"kind": "sentencepiece", "name": "b", "size": 9, "file": 3, "sha256": "0"}])
def test_what_is_no_description_is_refused(wrong):
    with pytest.raises(ValueError) as raised:
        Stored.from_data(wrong)
    assert "vocabulary" in str(raised.value) and len(str(raised.value)) < 300


def test_a_file_of_another_size_is_refused(tmp_path):
    stored = vocabularies.store(registered.docs_corpus(), tmp_path, "inputs")
    with pytest.raises(ValueError, match="has 3996 pieces, and config.json says 5000"):
        vocabularies.load(stored._replace(size=5100), tmp_path)
    with pytest.raises(ValueError, match="of bytes with 9 sentinels has 268 ids, and config.json in .* gives it 20"):
        vocabularies.load(Stored("bytes", "bytes", 20, 9), tmp_path)
