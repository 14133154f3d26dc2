import re

import pytest
import seqio

from switch_tf.refusals import Refusal
from switch_tf.tasks import corpora, pinned, source_corpus, vocabularies


@pytest.fixture
def one_distribution(monkeypatch):
    """Sets the pins to those of one small distribution, with another digest or version where asked; reads."""

    def read(version="0.5.0", digest=source_corpus.DISTRIBUTIONS["gin-config"][1]):
        monkeypatch.setattr(source_corpus, "DISTRIBUTIONS", {"gin-config": (version, digest)})
        return source_corpus._sources.__wrapped__()  # without the memory of this process

    return read


def test_the_corpus_is_the_pinned_one_and_lossless_in_its_vocabulary():
    texts = {split: source_corpus.read_sources(split)["text"] for split in ("train", "validation")}
    assert {split: len(found) for split, found in texts.items()} == source_corpus.NUM_FILES
    vocabulary = vocabularies.source_corpus()
    for text in texts["validation"][:20]:
        ids = vocabulary.encode(text)
        assert vocabulary.decode(ids) == text and vocabulary.unk_id not in ids


def test_its_pins_are_those_of_the_docs_corpus():
    assert {name: version for name, (version, _) in source_corpus.DISTRIBUTIONS.items()} == {
        name: version for name, (version, _) in corpora.DISTRIBUTIONS.items()
    }


def test_blocks_that_were_there_before_are_left_out_and_splits_are_by_file():
    files = {
        "b": [("b.py", "# Licence\n\n\nx = 1\n  \ny = 2\n")],
        "a": [("a.py", "\n# Licence\n\ndef f():\n\n    return 1\n"), ("c.py", "#  Licence\n"), ("d.py", "")],
    }
    found = dict(source_corpus._assemble(files))
    assert found == {"a.py": "# Licence\n\ndef f():\n\n    return 1", "b.py": "x = 1\n\ny = 2"}


def test_no_block_of_the_held_out_files_is_in_the_others():
    def blocks(split):
        return {" ".join(block.split()) for text in source_corpus.read_sources(split)["text"]
                for block in re.split(r"\n(?:[ \t]*\n)+", text)}  # fmt: skip

    assert not blocks("validation") & blocks("train")


def test_another_version_is_read_and_named_and_edited_files_are_refused(one_distribution, capsys):
    assert one_distribution(version="0.4.0")
    assert "gin-config 0.5.0 (pinned: 0.4.0)" in capsys.readouterr().err
    with pytest.raises(Refusal, match=r"source corpus needs gin-config==0\.5\.0 as published.*--force-reinstall"):
        one_distribution(digest="0123456789abcdef")
    with pytest.raises(RuntimeError, match="the code that collects it changed"):
        one_distribution()  # all as published, and yet not the whole corpus


def test_an_example_is_span_corruption_of_code():
    task = seqio.TaskRegistry.get("source_corpus_span_corruption")
    dataset = task.get_dataset({"inputs": 128, "targets": 29}, split="validation", shuffle=False,
                               try_in_mem_cache=False)  # fmt: skip
    example = next(dataset.as_numpy_iterator())
    assert example["inputs"].shape == (128,) and example["targets"].shape == (29,)
    newline = vocabularies.source_corpus().encode("\n")
    assert len(newline) == 1 and newline[0] in example["inputs"]
    assert 4095 in example["inputs"] and example["targets"][0] == 4095


def test_one_file_in_twenty_is_held_out():
    names = [f"{number}.py" for number in range(2000)]
    assert 70 < sum(pinned.split_of(name) == "validation" for name in names) < 130
