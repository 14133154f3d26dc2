import hashlib
import re
from importlib import metadata

import pytest

from switch_tf.refusals import Refusal
from switch_tf.tasks import corpora

PINS = dict(corpora.DISTRIBUTIONS)


@pytest.fixture
def small_corpus(monkeypatch, tmp_path):
    """The corpus of one small distribution in an empty cache; returns a function that loads it."""
    digest = corpora.DISTRIBUTIONS["gin-config"]
    monkeypatch.setattr(corpora, "DISTRIBUTIONS", {"gin-config": digest})
    content = corpora._assemble(corpora._read_distributions())
    monkeypatch.setattr(corpora, "SHA256", hashlib.sha256(content).hexdigest())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def load():
        corpora._content.cache_clear()
        return corpora.docs_corpus_documents.__wrapped__()  # without the memory of this process

    yield load
    corpora._content.cache_clear()


def test_the_corpus_is_the_pinned_one():
    documents = corpora.docs_corpus_documents()
    content = corpora.cache_path().read_bytes()
    assert hashlib.sha256(content).hexdigest() == corpora.SHA256
    splits = [document["split"] for document in documents]
    assert {split: splits.count(split) for split in set(splits)} == corpora.NUM_DOCUMENTS


def test_every_distribution_is_the_installed_one():
    assert {name: metadata.version(name) for name in corpora.DISTRIBUTIONS} == {
        name: version for name, (version, _) in corpora.DISTRIBUTIONS.items()
    }


def test_no_file_object_or_paragraph_is_in_both_splits():
    documents = corpora.docs_corpus_documents()

    def collect(split, values):
        return {value for document in documents if document["split"] == split for value in values(document)}

    def letters(document):
        return [re.sub(r"\W+", "", paragraph.lower()) for paragraph in document["paragraphs"]]

    for values in (lambda d: [d["object"].partition("::")[0]], lambda d: [d["object"]], letters):
        assert not collect("train", values) & collect("validation", values)


def test_no_paragraph_is_repeated():
    paragraphs = [paragraph for document in corpora.docs_corpus_documents() for paragraph in document["paragraphs"]]
    assert len(paragraphs) == len(set(paragraphs))


def test_a_document_joins_the_paragraphs_of_one_docstring(monkeypatch):
    documents = (
        {"split": "train", "object": "a.py::f", "paragraphs": ["One.", "Two."]},
        {"split": "validation", "object": "b.py::g", "paragraphs": ["Three."]},
    )
    monkeypatch.setattr(corpora, "docs_corpus_documents", lambda: documents)
    assert corpora.docs_corpus("train") == ["One.\nTwo."]
    assert corpora.docs_corpus("validation") == ["Three."]


def test_a_corpus_is_collected_once(small_corpus, monkeypatch):
    first = small_corpus()
    assert [path.name for path in corpora.cache_path().parent.iterdir()] == ["docs_corpus.jsonl"]
    monkeypatch.setattr(corpora, "_collect", lambda: pytest.fail("collected again"))
    assert small_corpus() == first


def test_a_torn_cache_is_replaced(small_corpus):
    documents = small_corpus()
    content = corpora.cache_path().read_bytes()
    corpora.cache_path().write_bytes(content[:100])
    assert small_corpus() == documents
    assert corpora.cache_path().read_bytes() == content


def test_a_cache_that_cannot_be_written_is_done_without(small_corpus, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match=r"could not be kept in .*file/switch_tf.*set XDG_CACHE_HOME"):
        assert small_corpus()


def test_other_versions_make_a_corpus_of_their_own_and_are_named(small_corpus, monkeypatch, capfd):
    pinned_digest = (small_corpus(), corpora.content_digest())[1]
    monkeypatch.setattr(corpora, "SHA256", "another")
    monkeypatch.setattr(corpora, "DISTRIBUTIONS", {
        "gin-config": ("0.4.0", ""), "etils": PINS["etils"], "no-such-distribution": ("1.0", "")})
    documents = small_corpus()
    named = "gin-config 0.5.0 (pinned: 0.4.0), no-such-distribution is not installed (pinned: 1.0)"
    assert named in capfd.readouterr().err
    assert {document["object"].partition("/")[0] for document in documents} == {"gin", "etils"}
    assert corpora.content_digest() != pinned_digest
    monkeypatch.setattr(corpora, "_collect", lambda: pytest.fail("collected again"))
    assert small_corpus() == documents


def test_a_torn_cache_of_other_versions_is_replaced(small_corpus, monkeypatch):
    monkeypatch.setattr(corpora, "SHA256", "another")
    monkeypatch.setattr(corpora, "DISTRIBUTIONS", {"gin-config": ("0.4.0", "")})
    documents = small_corpus()
    [file] = corpora.cache_path().parents[1].glob("installed_*/*")
    file.write_bytes(file.read_bytes()[:100])
    assert small_corpus() == documents


def test_edited_files_are_refused_by_name(small_corpus, monkeypatch):
    monkeypatch.setattr(corpora, "DISTRIBUTIONS", {"gin-config": ("0.5.0", "0123456789abcdef")})
    with pytest.raises(Refusal, match=r"gin-config==0\.5\.0 as published.*--force-reinstall gin-config==0\.5\.0"):
        small_corpus()
