"""Fingerprints of data files depend on name, size and content, not on the folder."""

import pytest
import seqio
import tensorflow as tf

from switch_tf import data
from switch_tf.data import task_catalog
from switch_tf.data.task_catalog import source_fingerprint
from switch_tf.storage import places
from switch_tf.tasks import corpora, docs_corpus  # noqa: F401  (registers)

FEATURES = {key: seqio.Feature(seqio.ByteVocabulary(), add_eos=True) for key in ("inputs", "targets")}


@pytest.fixture
def add_task():
    """A function that registers a task of the lines of files, for the time of one test."""
    names = []

    def add(name, files, splits=("train", "validation")):
        def read(file):
            return tf.data.TextLineDataset(file).map(lambda line: {"inputs": line, "targets": line})

        seqio.TaskRegistry.add(name, source=seqio.FileDataSource(read, dict.fromkeys(splits, files)),
                               preprocessors=[seqio.preprocessors.tokenize], output_features=FEATURES)
        names.append(name)
        return name

    yield add
    for name in names:
        (seqio.TaskRegistry if name in seqio.TaskRegistry.names() else seqio.MixtureRegistry).remove(name)


def _write(folder, **texts):
    folder.mkdir(exist_ok=True)
    for name, text in texts.items():
        (folder / f"{name}.txt").write_text(text)
    return f"{folder}/*.txt"


def test_moved_files_are_the_same_and_shuffled_lines_are_others(add_task, tmp_path):
    one = add_task("one", _write(tmp_path / "one", a="first\nsecond\n", b="third\n"))
    moved = source_fingerprint(one, "train")
    assert {name: text.partition(",")[0] for name, text in moved.items()} == {
        "one: a.txt": "13 bytes", "one: b.txt": "6 bytes"}
    (tmp_path / "one").rename(tmp_path / "two")
    (tmp_path / "one").symlink_to(tmp_path / "two")
    assert source_fingerprint(one, "train") == moved
    _write(tmp_path / "two", a="second\nfirst\n")
    changed = source_fingerprint(one, "train")
    assert [name for name in moved if changed[name] != moved[name]] == ["one: a.txt"]


def test_of_large_files_blocks_from_everywhere_are_read(add_task, tmp_path, monkeypatch):
    monkeypatch.setattr(places, "_BLOCK", 4)
    monkeypatch.setattr(task_catalog, "_BUDGET", 16)  # 4 blocks of a file of 40 bytes: at 0, 12, 24, 36
    large = add_task("large", _write(tmp_path, a="0123456789" * 4))
    before = source_fingerprint(large, "train")["large: a.txt"]
    for place, is_seen in ((0, True), (5, False), (13, True), (27, True), (30, False), (39, True)):
        text = list("0123456789" * 4)
        text[place] = "x"
        _write(tmp_path, a="".join(text))
        assert (source_fingerprint(large, "train")["large: a.txt"] != before) == is_seen, place
    monkeypatch.setattr(task_catalog, "_BUDGET", 40)  # all of it
    _write(tmp_path, a="0123456789" * 4)
    before = source_fingerprint(large, "train")["large: a.txt"]
    for place in range(40):
        text = list("0123456789" * 4)
        text[place] = "x"
        _write(tmp_path, a="".join(text))
        assert source_fingerprint(large, "train")["large: a.txt"] != before


def test_a_mixture_has_the_files_of_its_tasks_that_have_the_split(add_task, tmp_path):
    names = [add_task("member_one", _write(tmp_path / "one", a="x")),
             add_task("member_two", _write(tmp_path / "two", a="y"), ["train"])]
    seqio.MixtureRegistry.add("both", names, default_rate=1)
    try:
        assert set(source_fingerprint("both", "train")) == {"member_one: a.txt", "member_two: a.txt"}
    finally:
        seqio.MixtureRegistry.remove("both")


def test_a_file_of_the_current_folder_is_known_too(add_task, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _write(tmp_path, here="x")
    assert source_fingerprint(add_task("here", "here.txt"), "train")["here: here.txt"].startswith("1 bytes, ")


def test_the_docs_corpus_is_known_by_its_hash():
    assert source_fingerprint("docs_corpus_span_corruption", "validation") == {
        "docs_corpus_span_corruption": corpora.SHA256[:16]}


def test_a_folder_for_a_file_is_refused(add_task, tmp_path):
    task = add_task("folder", str(tmp_path / "*"))
    (tmp_path / "inner").mkdir()
    with pytest.raises(ValueError, match=r"The data file '.*inner' of 'folder', split 'train', cannot be read "
                                         r"\(Is a directory\)"):
        source_fingerprint(task, "train")


def test_a_vocabulary_is_known_by_its_content():
    [pieces] = data.vocabulary_fingerprint("docs_corpus_span_corruption")
    assert pieces.startswith("SentencePieceVocabulary of 4096 ids, ")
    assert data.vocabulary_fingerprint("docs_corpus_span_corruption_bytes") == ["ByteVocabulary of 359 ids"]
