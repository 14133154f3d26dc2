"""A run from gin files: mistakes are refused before TensorFlow is imported, or once the parts are together."""

import json
import subprocess
import sys

import gin
import keras
import pytest

from switch_tf.cli import gin_files, gin_run, starting
from switch_tf.configs import factories, gin_calls
from switch_tf.configs.run import Run
from switch_tf.evaluation.objectives import Objective
from switch_tf.partitioning.partitioner import Partitioner
from switch_tf.refusals import Refusal
from switch_tf.training import trainer

RUN = ["gin/models/switch_tiny.gin", "gin/tasks/c4.gin", "gin/runs/pretrain.gin"]
EARLY = {
    "NUM_EXPERTS=-1": "num_experts must be an integer of at least 0, not -1.",
    "SwitchConfig.num_heads=0": "num_heads must be an integer of at least 1, not 0.",
    "StepSettings.clip_norm=-1": "clip_norm must be a number above 0",
    "BATCH_SIZE='8'": "BATCH_SIZE must be an integer of at least 1, not '8'.",
    "StepSettings.steps_per_call=3": "TRAIN_STEPS must be a multiple of steps_per_call (3)",
    "MESH_SHAPE='data:8'": "MESH_SHAPE must read like",
    "NUM_EXPERT=4": "Did you mean 'NUM_EXPERTS'?",
    "SwitchConfig.num_head=3": "SwitchConfig doesn't have a parameter named 'num_head'. Did you mean 'num_heads'?",
    "NUM_EXPERTS=eight": "--gin.NUM_EXPERTS=eight cannot be read",
    "SwitchConfg.d_ff=3": "No configurable matching 'SwitchConfg'. Did you mean 'SwitchConfig'?",
    "Trainer.optimizer=@Adafacto()": "No configurable matching 'Adafacto'. Did you mean 'Adafactor'?",
    "NoSuch.thing=1": "No configurable matching 'NoSuch'. These files name Adafactor, Layout, ",
    "Trainer.optimizer=@NoSuch()": "No configurable matching 'NoSuch'. These files name Adafactor, Layout, ",
    "MIXTURE_OR_TASK_NAME='c4_span_coruption'": "Did you mean 'c4_span_corruption'?",
    "Adafactor.learning_rat=1": "Adafactor doesn't have a parameter named 'learning_rat'. Did you mean 'learning_rat",
    "MODEL_DIR=''": "MODEL_DIR must be text that is not empty, not ''.",
    "TASK_FEATURE_LENGTHS=128": "TASK_FEATURE_LENGTHS must give the tokens of",
}
DYNAMIC = "from __gin__ import dynamic_registration\n"
# The rest of a file -> the sentence that refuses it.
FILES = {
    "from switch_tf.optim import shedules": "There is no module 'switch_tf.optim.shedules'. Did you mean 'schedules'?",
    "from switch_tf.optim import schedules\nX = @schedules.RsqrtDecy()": "has no 'RsqrtDecy'. Did you mean 'Rsqrt",
    "X = @schedules.RsqrtDecay()": "'schedules' is not imported in this file. Add: from switch_tf.optim",
    "include 'gone.gin'": "mine.gin includes 'gone.gin', which is neither here nor among the shipped files.",
    "include 'mine.gin'": "mine.gin cannot be read: it includes itself",
    "TRAIN_STEPS = [1, %SEED]\nSEED = %TRAIN_STEPS": "stands for itself",
    "\ufeffSEED = 1": "mine.gin starts with a byte order mark; save it as UTF-8 without one.",
    "DROPUT_RATE = 0.1": "DROPUT_RATE is set but nothing uses it. Did you mean 'DROPOUT_RATE'?",
}
# Runs every command line in one process, and says what each came to and whether TensorFlow was imported by it.
COMMANDS = """
import contextlib, io, json, sys
from switch_tf.cli.main import main
for words in json.loads(sys.argv[1]):
    with contextlib.redirect_stderr(io.StringIO()) as said:
        status = main(words)
    print(json.dumps([status, said.getvalue(), "tensorflow" in sys.modules]))
"""


def test_what_the_files_alone_get_wrong_is_refused_without_tensorflow(tmp_path):
    files = [f"--gin_file={file}" for file in (*RUN, "gin/layouts/expert.gin")]
    lines = [["train", *files, "--gin.MODEL_DIR='run'", f"--gin.{binding}"] for binding in EARLY]
    for number, text in enumerate(FILES):
        (tmp_path / str(number)).mkdir()
        head = "" if text.startswith("\ufeff") else DYNAMIC
        (tmp_path / str(number) / "mine.gin").write_text(f"{head}{text}\n")
        lines += [["train", *files, "--gin_file=mine.gin", f"--gin_search_paths={number}", "--gin.MODEL_DIR='run'"]]
    lines += [["verify-layout", *files, "--gin.NUM_EXPERTS=-1"], ["train"], ["train", files[0], "--gin_file=gone.gin"]]
    done = subprocess.run([sys.executable, "-c", COMMANDS, json.dumps(lines)], cwd=tmp_path, capture_output=True,
                          text=True)
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(told) == len(lines), done.stderr
    messages = [*EARLY.values(), *FILES.values(), EARLY["NUM_EXPERTS=-1"],
                "a model (gin/models/switch_tiny.gin), a task", "'gone.gin'"]
    for words, message, (status, said, is_imported) in zip(lines, messages, told, strict=True):
        assert status == 2 and message in said and said.count("\n") == 1 and not is_imported, (words, said)
    assert {entry.name for entry in tmp_path.iterdir()} == {str(number) for number in range(len(FILES))}


def test_a_run_without_its_required_parameters_is_refused(tmp_path):
    (tmp_path / "half.gin").write_text("from __gin__ import dynamic_registration\nfrom switch_tf.configs import run\n"
                                       "from switch_tf.configs import factories\nrun.Run.pack = True\n"
                                       "run.StepSettings.use_xla = True\nfrom switch_tf.partitioning import layout\n"
                                       "factories.create_partitioner.layout = @layout.Layout()\n"
                                       "factories.Trainer.run = @run.Run()\n")
    with pytest.raises(Refusal, match="missing 5 required positional arguments: 'model_dir'"):
        gin_run.look([str(tmp_path / "half.gin")])


def test_a_name_that_keras_lacks_is_refused_with_the_nearest(tmp_path):
    (tmp_path / "mine.gin").write_text(f"{DYNAMIC}import keras\nX = @keras.optimizers.AdamWW()\n")
    with pytest.raises(Refusal, match="keras.optimizers has no 'AdamWW'. Did you mean 'AdamW'?"):
        gin_run.look([*RUN, str(tmp_path / "mine.gin")])


def test_a_parameter_that_leads_back_to_itself_is_refused():
    with pytest.raises(Refusal, match="lead back to themselves"):
        gin_run.look(RUN, ["MODEL_DIR='run'", "SwitchConfig.d_ff=@SwitchConfig()"])


def _make_trainer(*bindings):
    gin_run.look(["gin/models/switch_tiny.gin", "gin/tasks/docs_corpus.gin", "gin/runs/pretrain.gin"],
                 ["MODEL_DIR='run'", *bindings])
    return starting.make_trainer(gin_run.on_this_machine(), "", [])


@pytest.mark.parametrize("planted", [ValueError, TypeError, RuntimeError, RecursionError])
def test_a_bug_of_a_constructor_is_no_mistake_of_the_user(planted, monkeypatch):
    def fail(self):
        raise planted("planted")

    monkeypatch.setattr(trainer.Trainer, "_check", fail)
    with pytest.raises(planted, match="planted") as caught:
        _make_trainer()
    assert not isinstance(caught.value, Refusal)
    assert "fail" in [entry.name for entry in caught.traceback]


def test_a_bug_of_a_constructor_in_a_call_of_keras_is_no_mistake_either(monkeypatch):
    monkeypatch.setattr(trainer.Trainer, "_check", lambda self: keras.ops.reshape([1, 2], (3,)))
    with pytest.raises(Exception, match="reshape") as caught:
        _make_trainer()
    assert not isinstance(caught.value, Refusal)


def test_a_refusal_of_a_constructor_passes(monkeypatch):
    monkeypatch.setattr(trainer.Trainer, "_check", lambda self: gin_run.look([]))
    with pytest.raises(Refusal, match="^A run is described by gin files.*--gin_file.$"):
        _make_trainer()


@pytest.mark.parametrize("binding, message", [
    ("Adafactor.gradient_accumulation_steps=-1", "`gradient_accumulation_steps` must be an integer >= 2"),
    ("SwitchTransformer.dtype='float99'", "Cannot convert 'float99' to a mixed precision DTypePolicy"),
])
def test_a_value_that_only_keras_finds_wrong_is_refused(binding, message):
    with pytest.raises(Refusal, match=message):
        _make_trainer(binding)


def test_a_required_parameter_without_a_value_is_refused():
    def halve(number=gin.REQUIRED):
        return number / 2

    with pytest.raises(Refusal, match="^Required bindings for `halve` not provided in config: ..number..$"):
        gin_calls.or_mistake(gin.external_configurable(halve))


def test_a_value_for_an_optimizer_of_keras_is_refused(tmp_path):
    (tmp_path / "mine.gin").write_text(f"{DYNAMIC}import keras\nfrom switch_tf.configs import factories\n"
                                       "keras.optimizers.AdamW.ema_momentum = 3\n"
                                       "keras.optimizers.AdamW.use_ema = True\n"
                                       "factories.Trainer.optimizer = @keras.optimizers.AdamW()\n")
    described = gin_run.look([*RUN, str(tmp_path / "mine.gin")], ["MODEL_DIR='run'"])
    with pytest.raises(Refusal, match="`ema_momentum` must be in the range"):
        described.make_optimizer()


def test_a_wrong_parameter_in_a_file_of_the_users_is_one_sentence(tmp_path):
    (tmp_path / "mine.gin").write_text(f"{DYNAMIC}from switch_tf.configs import run\nrun.Run.train_step = 3\n")
    with pytest.raises(Refusal) as refused:
        gin_run.look([*RUN, str(tmp_path / "mine.gin")], ["MODEL_DIR='run'"])
    assert str(refused.value) == (f"{tmp_path}/mine.gin: Run doesn't have a parameter named 'train_step'. "
                                  "Did you mean 'train_steps'?")


def test_an_experiment_is_described_before_anything_is_made():
    described = gin_run.look(RUN, ["MODEL_DIR='run'", "NUM_EXPERTS=4"])
    assert (described.config.num_experts, described.run.model_dir, described.partitioner) == (4, "run", None)


def test_the_configuration_that_a_run_writes_describes_the_same_experiment(tmp_path):
    """It records defaults too, such as an objective of None."""
    files = ["gin/models/switch_tiny.gin", "gin/tasks/docs_corpus.gin", "gin/runs/pretrain.gin"]
    described = gin_run.look(files, [f"MODEL_DIR='{tmp_path}/run'"])
    gin.get_configurable(factories.Trainer)(partitioner=Partitioner())
    (tmp_path / "operative_config.gin").write_text(gin.operative_config_str())
    again = gin_run.look([str(tmp_path / "operative_config.gin")])
    assert "Trainer.objective = None" in gin.config_str()
    assert (again.config, again.run, again.settings) == (described.config, described.run, described.settings)
    assert again.make_model().config == described.config
    assert type(again.make_objective()) is Objective


@pytest.mark.parametrize("text", ["", "# nothing", "include 'gin/models/switch_tiny.gin'\n"])
def test_files_without_a_run_are_told_so(tmp_path, text):
    (tmp_path / "empty.gin").write_text(text)
    with pytest.raises(Refusal, match="empty.gin. Give a model .gin/models/switch_tiny.gin., a task"):
        gin_run.look([str(tmp_path / "empty.gin")])


def _parse(*files, bindings=()):
    gin_files.parse([*RUN, *files], ["MODEL_DIR='run'", *bindings])


def test_the_parts_of_a_run_come_together():
    _parse(bindings=["BATCH_SIZE=64", "StepSettings.num_microbatches=2"])
    described = gin_run.on_this_machine()
    assert described.run == gin.get_configurable(Run)() and described.run.batch_size == 64
    assert described.settings.num_microbatches == 2
    assert described.layout is described.partitioner.layout and described.layout.num_devices == 1
    first, second = described.make_model(), described.make_model()
    assert first is not second and first.config == described.config == second.config
    assert described.make_optimizer() is not described.make_optimizer()


def test_parts_that_do_not_go_together_are_refused_but_for_whoever_looks_for_those_that_do():
    _parse("gin/layouts/expert.gin", bindings=["BATCH_SIZE=12"])
    with pytest.raises(Refusal, match="BATCH_SIZE must be a multiple of 8"):
        gin_run.on_devices(8, "TPU")
    described = gin_run.on_devices(8, "TPU", is_checked=False)
    assert described.layout.mesh == {"data": 8} and described.partitioner is None


def test_a_layout_for_other_devices_is_refused():
    _parse("gin/layouts/expert.gin", bindings=["MESH_SHAPE='data=16'"])
    with pytest.raises(Refusal, match="is for 16 devices, but there are 8"):
        gin_run.on_this_machine()
