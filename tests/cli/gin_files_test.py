import gin
import pytest

from switch_tf import SwitchConfig
from switch_tf.cli import gin_files
from switch_tf.refusals import Refusal

TINY = ["gin/models/switch_tiny.gin"]
RUN = [*TINY, "gin/tasks/docs_corpus.gin", "gin/runs/pretrain.gin"]


def test_shipped_files_are_found_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    gin_files.parse(TINY)
    assert gin.get_configurable(SwitchConfig)() == SwitchConfig.from_preset("switch_tiny")


def test_bindings_override_macros_and_parameters():
    gin_files.parse(TINY, ["NUM_EXPERTS=16", "SwitchConfig.d_ff=8", "DROPOUT_RATE = 0.3"])
    config = gin.get_configurable(SwitchConfig)()
    assert (config.num_experts, config.d_ff, config.dropout_rate) == (16, 8, 0.3)


def test_a_users_file_includes_shipped_ones_and_is_found_on_the_search_paths(tmp_path):
    (tmp_path / "mine.gin").write_text("include 'gin/models/switch_tiny.gin'\nDROPOUT_RATE = 0.3\n")
    gin_files.parse(["mine.gin"], search_paths=str(tmp_path))
    assert gin.get_configurable(SwitchConfig)().dropout_rate == 0.3


@pytest.mark.parametrize(("files", "bindings", "message"), [
    (["gin/models/switch_tny.gin"], [], "There is no gin file .* Did you mean 'gin/models/switch_tiny.gin'?"),
    (TINY, ["NUM_EXPERT=3"], "No gin file defines NUM_EXPERT. Did you mean 'NUM_EXPERTS'?"),
    (TINY, ["SwitchConfg.d_ff=3"], "No configurable matching 'SwitchConfg'. Did you mean 'SwitchConfig'?"),
    (TINY, ["SwitchConfig.num_head=3"], "parameter named 'num_head'. Did you mean 'num_heads'?"),
    (TINY, ["NUM_EXPERTS=many"], "cannot be read: .* text needs quotes within quotes"),
    (TINY, ["NUM_EXPERTS"], "--gin.NUM_EXPERTS must have the form --gin.NAME=VALUE"),
    (TINY, ["NUM_EXPERTS = "], "--gin.NUM_EXPERTS= must have the form --gin.NAME=VALUE"),
    (RUN, [], "MODEL_DIR has no value; set it, for example --gin.MODEL_DIR"),
    ([RUN[0], RUN[2]], ["MODEL_DIR='x'"], "MIXTURE_OR_TASK_NAME has no value; add a task file: "),
    (RUN[1:], ["MODEL_DIR='x'"], None),
])
def test_what_gin_would_accept_in_silence_is_refused_in_one_sentence(files, bindings, message):
    if message is None:
        gin_files.parse(files, bindings)  # a run without a model file has SwitchConfig's defaults: T5 small
        return
    with pytest.raises(Refusal, match=message) as raised:
        gin_files.parse(files, bindings)
    assert "\n" not in str(raised.value)


def test_a_macro_that_nothing_uses_is_refused_with_the_nearest_that_is_used(tmp_path):
    (tmp_path / "mine.gin").write_text("include 'gin/models/switch_tiny.gin'\nDROPUT_RATE = 0.3\n")
    with pytest.raises(Refusal, match="DROPUT_RATE is set but nothing uses it. Did you mean 'DROPOUT_RATE'?"):
        gin_files.parse([str(tmp_path / "mine.gin")])


def test_a_module_that_fails_when_it_is_imported_is_told_in_a_sentence(tmp_path, monkeypatch):
    """SentencePiece raises RuntimeError where a user's own module reads a damaged vocabulary."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_failing_tasks.py").write_text("raise RuntimeError('Internal: could not parse ModelProto')\n")
    (tmp_path / "mine.gin").write_text("from __gin__ import dynamic_registration\nimport my_failing_tasks\n")
    with pytest.raises(Refusal, match="mine.gin: Internal: could not parse ModelProto"):
        gin_files.parse([str(tmp_path / "mine.gin")])
