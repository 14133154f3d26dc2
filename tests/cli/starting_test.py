import pathlib
import re
import shlex
import shutil
import types

import pytest

from switch_tf import SwitchConfig
from switch_tf.checkpoints import vocabulary_choice
from switch_tf.conversion import formats
from switch_tf.reporting import summaries


def test_the_run_folders_configuration_begins_with_what_a_reader_will_ask():
    config = SwitchConfig.from_preset("switch_tiny")
    command, versions, parameters, *rest = summaries.origin(["train", "--gin.MODEL_DIR='a run'"], config).split("\n")
    assert shlex.split(command) == ["#", "switch-tf", "train", "--gin.MODEL_DIR='a run'"]
    assert re.fullmatch(r"# \d{4}-\d\d-\d\d .+, switch_tf \S+, TensorFlow 2\.\S+, Keras 3\.\S+", versions)
    assert parameters == f"# {config.num_parameters:,} parameters" and rest == ["", ""]


def _vocabulary(model_dir, initial, task="docs_corpus_span_corruption", vocabulary=None):
    return vocabulary_choice.choose(types.SimpleNamespace(
        model_dir=str(model_dir), initial_checkpoint=initial and str(initial), mixture_or_task_name=task,
        vocabulary=vocabulary))


@pytest.fixture
def own_run(kept_run, tmp_path):
    """A run whose vocabulary is a user's own file, by a relative path."""
    folder = shutil.copytree(kept_run, tmp_path / "own_run")
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace('"name": "docs_corpus"', '"name": "own.model"'))
    return folder


def test_a_new_run_takes_the_vocabulary_of_the_weights_that_it_starts_from(own_run, kept_run, tmp_path, capsys):
    copied = f"{own_run}/vocabulary/inputs.model"
    for initial in (own_run, own_run / "checkpoints" / "step_00000007"):
        assert _vocabulary(tmp_path / "new", initial) == copied
    assert f"VOCABULARY is that of {own_run}: {copied}." in capsys.readouterr().err
    assert _vocabulary(tmp_path / "new", own_run, vocabulary="bytes") == "bytes"
    assert _vocabulary(tmp_path / "new", kept_run) is None  # the task's own
    assert _vocabulary(tmp_path / "new", None) is None


def test_a_run_that_goes_on_has_its_own_copy_though_the_first_run_is_gone(own_run, tmp_path):
    assert _vocabulary(own_run, tmp_path / "gone") == f"{own_run}/vocabulary/inputs.model"


def test_a_damaged_copy_does_not_stop_a_start(own_run, tmp_path, capsys):
    (own_run / "config.json").write_text("{")
    assert _vocabulary(tmp_path / "new", own_run) is None
    assert "is not used" in capsys.readouterr().err


def test_where_a_vocabulary_was_moved_the_copy_is_named(own_run, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"VOCABULARY 'own.model' is not there any more; this run keeps a copy of it: "
                                         r"--gin.VOCABULARY=\"'own_run/vocabulary/inputs.model'\""):
        _vocabulary("own_run", None, vocabulary="own.model")
    pathlib.Path("own.model").write_text("there")
    assert _vocabulary("own_run", None, vocabulary="own.model") == "own.model"
    assert _vocabulary("new", None, vocabulary="nowhere.model") == "nowhere.model"


def test_a_run_folder_is_no_hugging_face_folder(own_run, tmp_path):
    run = types.SimpleNamespace(model_dir=str(tmp_path / "new"), initial_checkpoint=str(own_run))
    assert formats.opened(run, None) is None
