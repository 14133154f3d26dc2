"""Gin files as data: names, macros and scopes, and what gin would find late or never."""

import gin
import pytest

from switch_tf import SwitchConfig
from switch_tf.configs import gin_syntax, parts
from switch_tf.configs.experiment import Experiment
from switch_tf.refusals import Refusal

TINY = ["gin/models/switch_tiny.gin"]
RUN = [*TINY, "gin/tasks/docs_corpus.gin", "gin/runs/pretrain.gin"]
DYNAMIC = "from __gin__ import dynamic_registration\n"
ADAM = DYNAMIC + """import keras
from switch_tf.training import trainer
trainer.Trainer.optimizer = @keras.optimizers.AdamW()
"""
EARLIER = DYNAMIC + """from switch_tf import config
from switch_tf.models import switch_transformer as model
from switch_tf.configs import factories
from switch_tf.optim import schedules
from switch_tf.partitioning import dtypes
from switch_tf.training import run
from switch_tf.training import trainer
import switch_tf.tasks.docs_corpus
import switch_tf.optim.adafactor

MODEL = @model.SwitchTransformer()
LEARNING_RATE = @schedules.Cooldown()
schedules.Cooldown:
  schedule = @switch_tf.optim.schedules.RsqrtDecay()
  last_step = %TRAIN_STEPS
factories.Cooldown.share = 0.25
switch_tf.optim.adafactor.Adafactor.clip_threshold = 2.0
config.SwitchConfig.d_ff = 64
run.Run.eval_batches = 7
run.StepSettings.use_xla = True
dtypes.dtype_policy.activation_dtype = 'float32'
trainer.Trainer.optimizer = @switch_tf.optim.adafactor.Adafactor()
MODEL/config.SwitchConfig.d_kv = 16
"""


def _config(said):
    return said.check().part(parts.CONFIG).make()


def _again(tmp_path, text):
    (tmp_path / "again.gin").write_text(text)
    return gin_syntax.read([str(tmp_path / "again.gin")])


@pytest.fixture
def read(tmp_path, monkeypatch):
    """Reads a run with a file of the user's own, beside which lies a module `my_metrics`."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_metrics.py").write_text("def recall(targets, predictions, k=1):\n    return {}\n")

    def read(text, *bindings):
        (tmp_path / "mine.gin").write_text(text)
        said = gin_syntax.read([*RUN, str(tmp_path / "mine.gin")], ["MODEL_DIR='run'", *bindings]).check()
        said.check_read(bindings)
        return said

    return read


def test_shipped_files_are_found_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert _config(gin_syntax.read(TINY)) == SwitchConfig.from_preset("switch_tiny")


def test_bindings_override_macros_and_parameters():
    config = _config(gin_syntax.read(TINY, ["NUM_EXPERTS=16", "SwitchConfig.d_ff=8", "DROPOUT_RATE = 0.3"]))
    assert (config.num_experts, config.d_ff, config.dropout_rate) == (16, 8, 0.3)


@pytest.mark.parametrize("value, read", {
    "runs/x": "runs/x", "gs://b/x": "gs://b/x", "data=4,model=2": "data=4,model=2", "eval/a/f1": "eval/a/f1",
    "2024-01-02": "2024-01-02", "it's": "it's", "a b # c": "a b # c", "done": "done", "true_story": "true_story",
    "True": True, "None": None, "3": 3, "1e-3": 1e-3, "1.5e0": 1.5, "1e400": float("inf"),
    "2.0": 2.0, "-2": -2, "'3'": "3", "[1, 'a']": [1, "a"], "3 # three": 3,
    "%SEED": gin_syntax.Macro("SEED"), "@run.Run": gin_syntax.Reference("switch_tf.configs.run.Run", "", False),
}.items())
def test_a_binding_that_is_no_gin_value_is_text(value, read):
    assert gin_syntax.read(RUN, [f"MODEL_DIR={value}"]).macros["MODEL_DIR"] == read


@pytest.mark.parametrize("value, steps", {"1e6": 10**6, "2.5E+3": 2500, "3e0": 3}.items())
def test_a_whole_number_may_have_an_exponent(value, steps):
    read = gin_syntax.read(RUN, [f"TRAIN_STEPS={value}"]).macros["TRAIN_STEPS"]
    assert (read, type(read)) == (steps, int)


def test_a_users_file_includes_shipped_ones_and_is_found_on_the_search_paths(tmp_path):
    (tmp_path / "mine.gin").write_text("include 'gin/models/switch_tiny.gin'\nDROPOUT_RATE = 0.3\n")
    assert _config(gin_syntax.read(["mine.gin"], search_paths=str(tmp_path))).dropout_rate == 0.3


@pytest.mark.parametrize("is_first", [True, False])
def test_earlier_names_bind_the_same_parameters(tmp_path, is_first):
    (tmp_path / "mine.gin").write_text(EARLIER)
    files = [*RUN, str(tmp_path / "mine.gin")]
    said = gin_syntax.read(files[::-1] if is_first else files, ["MODEL_DIR='run'", "schedules.Cooldown.share=0.5",
                                                                 "config.SwitchConfig.d_kv=4"]).check()
    assert {name for _, name in said.bound} <= set(parts.PARTS)
    assert said.bound["", "switch_tf.optim.schedules.Cooldown"]["share"] == 0.5
    assert said.bound["", parts.ADAFACTOR]["clip_threshold"] == 2.0
    assert said.bound["", parts.CONFIG]["d_kv"] == 4 and said.bound["", parts.RUN]["eval_batches"] == 7
    # A macro is a scope for what its value refers to, as in the configurations that gin writes down.
    model = said.part(parts.TRAINER).arguments["model"]
    assert model.arguments["config"].arguments["d_kv"] == 16 and said.part(parts.CONFIG).arguments["d_kv"] == 4
    # The text describes the same, and plain gin can parse it too.
    again = _again(tmp_path, said.text()).check()
    assert again.text() == said.text() and again.part(parts.TRAINER).arguments["model"].make().config.d_kv == 16
    gin.parse_config(said.text())
    assert gin.query_parameter("Cooldown.share") == 0.5


@pytest.mark.parametrize(("files", "bindings", "message"), [
    (["gin/models/switch_tny.gin"], [], "There is no gin file .* Did you mean 'gin/models/switch_tiny.gin'?"),
    (TINY, ["NUM_EXPERT=3"], "No gin file defines NUM_EXPERT. Did you mean 'NUM_EXPERTS'?"),
    (TINY, ["SwitchConfg.d_ff=3"], "No configurable matching 'SwitchConfg'. Did you mean 'SwitchConfig'?"),
    (TINY, ["SwitchConfig.num_head=3"], "parameter named 'num_head'. Did you mean 'num_heads'?"),
    (TINY, ["NUM_EXPERTS=[many"], "cannot be read: .* a bracket or a quote is not closed"),
    (TINY, ["NUM_EXPERTS='many"], "cannot be read"),
    (RUN, ["USE_CACHED_TASKS=Flase"], "Did you mean 'False'?.* quotes within quotes: .*=\"'Flase'\""),
    (RUN, ["BEST_METRIC=none"], "Did you mean 'None'?"),
    (RUN, ["MIXTURE_OR_TASK_MODULE=my.tasks"], "This name is T5X's; here the task's gin file imports the module"),
    (RUN, ["pack=True"], "This name is T5X's; here packing is --gin.Run.pack=True"),
    (RUN, ["train/utils.DatasetConfig.pack=True"], "This name is T5X's; here the data are described by"),
    (TINY, ["NUM_EXPERTS"], "--gin.NUM_EXPERTS must have the form --gin.NAME=VALUE"),
    (TINY, ["NUM_EXPERTS = "], "--gin.NUM_EXPERTS= must have the form --gin.NAME=VALUE"),
    (RUN, [], "MODEL_DIR has no value; set it, for example --gin.MODEL_DIR"),
    ([RUN[0], RUN[2]], ["MODEL_DIR='x'"], "MIXTURE_OR_TASK_NAME has no value; add a task file: "),
])
def test_what_gin_would_accept_in_silence_is_refused_in_one_sentence(files, bindings, message):
    with pytest.raises(Refusal, match=message) as raised:
        gin_syntax.read(files, bindings).check()
    assert "\n" not in str(raised.value)


def test_a_module_that_fails_when_it_is_imported_is_told_in_a_sentence(tmp_path, monkeypatch):
    """SentencePiece raises RuntimeError where a user's own module reads a damaged vocabulary."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_failing_tasks.py").write_text("raise RuntimeError('Internal: could not parse ModelProto')\n")
    (tmp_path / "mine.gin").write_text(f"{DYNAMIC}import my_failing_tasks\n")
    said = gin_syntax.read([str(tmp_path / "mine.gin")])
    with pytest.raises(Refusal, match="mine.gin: Internal: could not parse ModelProto"):
        said.check()


def test_a_function_of_another_package_gets_its_parameters_from_gin(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_steps.py").write_text(
        "import gin\n@gin.configurable\ndef scale(number, by=1, then=None):\n    return (then or abs)(number * by)\n"
        "def halve(number, parts=2):\n    return number / parts\n")
    text = DYNAMIC + "import my_steps\nBY = 3\nmy_steps.scale.by = %BY\nmy_steps.scale.then = @my_steps.halve\n"
    (tmp_path / "mine.gin").write_text(f"{text}my_steps.halve.parts = 4\n")
    gin_syntax.read([str(tmp_path / "mine.gin")]).check().bind_others()
    assert parts.find("my_steps.scale")(8) == 6
    (tmp_path / "mine.gin").write_text(f"{text}my_steps.halve.part = 4\n")
    said = gin_syntax.read([str(tmp_path / "mine.gin")])
    with pytest.raises(Refusal, match="halve doesn't have a parameter named 'part'. Did you mean 'parts'?"):
        said.check()


def test_a_function_that_a_module_makes_configurable_is_known_by_its_end(tmp_path, monkeypatch):
    """In files without dynamic registration, as older ones are written."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_older.py").write_text("import gin\n@gin.configurable\ndef older(by=1):\n    return by\n")
    (tmp_path / "mine.gin").write_text("import my_older\nolder.by = 5\nX = @older()\nY = [%X, %X]\nZ = %Y\nY = %Z\n")
    said = gin_syntax.read([str(tmp_path / "mine.gin")]).check_names()
    said.bind_others()
    assert said.macro("X") == 5 and parts.find("my_older.older")() == 5


def test_a_macro_that_only_a_metric_reads_is_accepted(read):
    said = read(DYNAMIC + "import my_metrics\nDEPTH = 1\nmy_metrics.recall.k = %DEPTH\n", "DEPTH=5")
    assert said.macro("DEPTH") == 5


def test_a_macro_that_another_optimizer_does_not_read_is_refused(read):
    with pytest.raises(Refusal, match="LEARNING_RATE is set, but no part of this run reads it"):
        read(ADAM, "LEARNING_RATE=0.001")
    read(ADAM + "keras.optimizers.AdamW.learning_rate = %LEARNING_RATE\n", "LEARNING_RATE=0.001")


def test_a_macro_that_is_read_through_another_is_accepted(read):
    assert read(DYNAMIC + "RATE = 0.5\nLEARNING_RATE = %RATE\n", "RATE=0.25").macro("LEARNING_RATE") == 0.25


def test_a_macro_counts_as_used_although_a_later_statement_replaces_the_use(read):
    said = read(DYNAMIC + "from switch_tf import config\nconfig.SwitchConfig.dropout_rate = 0.5\n")
    assert said.bound["", parts.CONFIG]["dropout_rate"] == 0.5


@pytest.mark.parametrize("text, sentence", [
    ("SEED = %SEED", "SEED stands for itself: SEED = %SEED."),
    ("SEED = [1, {'a': %TRAIN_STEPS}]\nTRAIN_STEPS = %SEED", "stands for itself"),
    ("TRAIN_STEP = 1", "TRAIN_STEP is set but nothing uses it. Did you mean 'TRAIN_STEPS'?"),
    ("SEED = %NO_SUCH", "NO_SUCH has no value; add it: --gin.NO_SUCH=VALUE."),
    ("SEED = %gin.REQUIRED", "SEED has no value; set it"),
])
def test_what_gin_would_find_late_or_never_is_refused(read, text, sentence):
    with pytest.raises(Refusal) as refused:
        read(f"{DYNAMIC}{text}\n")
    assert sentence in str(refused.value)


def test_macros_that_double_each_other_take_no_time(tmp_path):
    """Thirty of them would stand for a thousand million values."""
    doubling = "".join(f"M{index} = [%M{index + 1}, %M{index + 1}]\n" for index in range(30)) + "M30 = 1\n"
    text = DYNAMIC + "from switch_tf.configs import run\nrun.Run.seed = %M0\n" + doubling
    (tmp_path / "mine.gin").write_text(text)
    said = gin_syntax.read([str(tmp_path / "mine.gin")]).check()
    with pytest.raises(Refusal, match="put macros into macros to more than 10,000 values"):
        said.part(parts.RUN)
    assert gin_syntax.assignments(tmp_path / "mine.gin")[0].keys() == {"run.Run.seed"}


def test_scopes_and_references_are_those_of_gin(read, tmp_path):
    said = read(DYNAMIC + """from switch_tf.optim import schedules
slow/schedules.RsqrtDecay.warmup_steps = 7
slow/later/schedules.RsqrtDecay.base = 2.0
LEARNING_RATE = @slow/later/schedules.Cooldown()
schedules.Cooldown.schedule = @schedules.RsqrtDecay()
schedules.Cooldown.last_step = 9
""")
    rate = said.part(parts.TRAINER).arguments["optimizer"].arguments["learning_rate"]
    assert rate.arguments["schedule"].arguments == {"warmup_steps": 7, "base": 2.0}
    assert Experiment.of(said) == Experiment.of(_again(tmp_path, said.text()).check())


@pytest.mark.parametrize("text, macro, message", [
    ("MIXTURE_OR_TASK_NAME = %TASK_NAME", "MIXTURE_OR_TASK_NAME", "TASK_NAME has no value; add it: --gin.TASK_NAME"),
    ("MIXTURE_OR_TASK_NAME = [%NUM_EXPERTS]", "MIXTURE_OR_TASK_NAME", "NUM_EXPERTS has no value; add a model file")])
def test_a_macro_that_stands_for_one_without_a_value_is_refused_in_files_of_a_task(tmp_path, text, macro, message):
    """They need not describe a whole run, so only what is asked for has to have a value."""
    (tmp_path / "mine.gin").write_text(text)
    said = gin_syntax.read([str(tmp_path / "mine.gin")]).check(is_whole=False)
    with pytest.raises(Refusal, match=message):
        said.macro(macro)
