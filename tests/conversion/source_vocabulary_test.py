"""The vocabulary goes along with the weights, as far as a name or a file can select it."""

import dataclasses

import pytest

from switch_tf import SwitchConfig
from switch_tf.checkpoints import run_config
from switch_tf.conversion import source_vocabulary
from switch_tf.data import vocabularies
from switch_tf.tasks import vocabularies as registered


@pytest.fixture
def make_run(tmp_path):
    """A function that makes a run folder which keeps two of the shipped vocabularies."""

    def make(*names):
        checkpoint = tmp_path / "checkpoints" / "step_00000001"
        checkpoint.mkdir(parents=True)
        (checkpoint / "checkpoint.json").write_text("{}")
        stored = {feature: vocabularies.store(getattr(registered, name)(), tmp_path, feature)._asdict()
                  for feature, name in zip(("inputs", "targets"), names, strict=True)}
        if names[0] == names[1]:
            stored["targets"] = stored["inputs"]
        run_config.write(tmp_path, run_config.RunConfig(
            SwitchConfig(), "float32", None, "a_task", {"inputs": 8, "targets": 8}, {}, stored))
        return tmp_path, checkpoint

    return make


def test_a_run_hands_over_the_file_that_it_keeps(make_run):
    run, checkpoint = make_run("docs_corpus", "docs_corpus")
    content = (run / "vocabulary" / "inputs.model").read_bytes()
    assert source_vocabulary.find(run) == source_vocabulary.find(checkpoint) == (content, None, None)


def test_bytes_are_handed_over_by_name(make_run):
    run, checkpoint = make_run("byte", "byte")
    assert source_vocabulary.find(checkpoint) == (None, "bytes", None)


def test_a_damaged_file_and_two_vocabularies_are_a_reason(make_run):
    run, _ = make_run("docs_corpus", "byte")
    assert "has one for inputs and another for targets" in source_vocabulary.find(run).reason
    saved = run_config.read(run)
    same = dict.fromkeys(saved.vocabularies, saved.vocabularies["inputs"])
    run_config.write(run, dataclasses.replace(saved, vocabularies=same))
    (run / "vocabulary" / "inputs.model").write_bytes(b"other")
    assert "is not the vocabulary that the run copied" in source_vocabulary.find(run).reason


def test_converted_weights_hand_over_the_file_beside_them(tmp_path):
    (tmp_path / "checkpoint.json").write_text("{}")
    assert "has neither spiece.model nor tokenizer.json" in source_vocabulary.find(tmp_path).reason
    (tmp_path / "spiece.model").write_bytes(b"a model")
    assert source_vocabulary.find(tmp_path).content == b"a model"
