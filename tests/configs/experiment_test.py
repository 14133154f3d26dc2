"""An experiment from gin files, from a run and from Python: mistakes are refused before TensorFlow is imported."""

import dataclasses
import json
import subprocess
import sys

import pytest

from switch_tf import Experiment, SwitchConfig, experiments
from switch_tf.configs import parts
from switch_tf.configs.parts import Part
from switch_tf.configs.run import Run, StepSettings
from switch_tf.evaluation.objectives import Objective
from switch_tf.partitioning import Layout
from switch_tf.refusals import Refusal
from switch_tf.training import trainer

RUN = ["gin/models/switch_tiny.gin", "gin/tasks/c4.gin", "gin/runs/pretrain.gin"]
LOCAL = ["gin/models/switch_tiny.gin", "gin/tasks/docs_corpus.gin", "gin/runs/pretrain.gin"]
EARLY = {
    "NUM_EXPERTS=-1": "num_experts must be an integer of at least 0, not -1.",
    "SwitchConfig.num_heads=0": "num_heads must be an integer of at least 1, not 0.",
    "StepSettings.clip_norm=-1": "clip_norm must be a number above 0",
    "BATCH_SIZE='8'": "BATCH_SIZE must be an integer of at least 1, not '8'.",
    "StepSettings.steps_per_call=3": "TRAIN_STEPS must be a multiple of steps_per_call (3)",
    "MESH_SHAPE='data:8'": "MESH_SHAPE must read like",
    "NUM_EXPERT=4": "Did you mean 'NUM_EXPERTS'?",
    "SwitchConfig.num_head=3": "SwitchConfig doesn't have a parameter named 'num_head'. Did you mean 'num_heads'?",
    "NUM_EXPERTS=eight": "num_experts must be an integer of at least 0, not 'eight'.",
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


def _from(tmp_path, text, *bindings, files=RUN):
    (tmp_path / "mine.gin").write_text(text)
    return Experiment.from_gin([*files, str(tmp_path / "mine.gin")], ["MODEL_DIR='run'", *bindings])


def test_a_run_without_its_required_parameters_is_refused(tmp_path):
    text = (f"{DYNAMIC}from switch_tf.configs import run\nrun.Run.pack = True\nrun.StepSettings.use_xla = True\n"
            "from switch_tf.partitioning import layout\nfrom switch_tf.partitioning import backends\n"
            "from switch_tf.training import trainer\nbackends.create_partitioner.layout = @layout.Layout()\n"
            "trainer.Trainer.run = @run.Run()\n")
    (tmp_path / "half.gin").write_text(text)
    with pytest.raises(Refusal, match="Run lacks model_dir, mixture_or_task_name, task_feature_lengths, train_steps, "):
        Experiment.from_gin([str(tmp_path / "half.gin")])


def test_a_name_that_keras_lacks_is_refused_with_the_nearest(tmp_path):
    with pytest.raises(Refusal, match="keras.optimizers has no 'AdamWW'. Did you mean 'AdamW'?"):
        _from(tmp_path, f"{DYNAMIC}import keras\nX = @keras.optimizers.AdamWW()\n")


def test_a_parameter_that_leads_back_to_itself_is_refused():
    with pytest.raises(Refusal, match="lead back to themselves"):
        Experiment.from_gin(RUN, ["MODEL_DIR='run'", "SwitchConfig.d_ff=@SwitchConfig()"])


@pytest.mark.parametrize("planted", [ValueError, TypeError, RuntimeError, RecursionError])
def test_a_bug_of_the_trainer_is_no_mistake_of_the_user(planted, monkeypatch, tmp_path):
    def fail(*arguments):
        raise planted("planted")

    monkeypatch.setattr(trainer, "check_trainable", fail)
    described = experiments.place_here(_from(tmp_path, "", files=LOCAL))
    with pytest.raises(planted, match="planted") as caught:
        experiments.make_trainer(described)
    assert not isinstance(caught.value, Refusal)
    assert "fail" in [entry.name for entry in caught.traceback]


@pytest.mark.parametrize("binding, message", [
    ("Adafactor.gradient_accumulation_steps=-1", "`gradient_accumulation_steps` must be an integer >= 2"),
    ("SwitchTransformer.dtype='float99'", "Cannot convert 'float99' to a mixed precision DTypePolicy"),
])
def test_a_value_that_only_keras_finds_wrong_is_refused(binding, message, tmp_path):
    described = experiments.place_here(_from(tmp_path, "", binding, files=LOCAL))
    with pytest.raises(Refusal, match=message):
        experiments.make_trainer(described)


def test_a_value_for_an_optimizer_of_keras_is_refused(tmp_path):
    described = _from(tmp_path, f"{DYNAMIC}import keras\nfrom switch_tf.training import trainer\n"
                                "keras.optimizers.AdamW.ema_momentum = 3\nkeras.optimizers.AdamW.use_ema = True\n"
                                "trainer.Trainer.optimizer = @keras.optimizers.AdamW()\n")
    with pytest.raises(Refusal, match="`ema_momentum` must be in the range"):
        described.make_optimizer()


def test_a_part_of_another_kind_is_refused(tmp_path):
    text = f"{DYNAMIC}from switch_tf.training import trainer\nfrom switch_tf.optim import adafactor\n"
    described = _from(tmp_path, f"{text}trainer.Trainer.model = @adafactor.Adafactor()\n")
    with pytest.raises(Refusal, match="Trainer.model must be a SwitchTransformer, not <"):
        described.make_model()
    with pytest.raises(Refusal, match="Experiment.run must be a Run, not 7."):
        _from(tmp_path, f"{text}trainer.Trainer.run = 7\n")


def test_a_wrong_parameter_in_a_file_of_the_users_is_one_sentence(tmp_path):
    with pytest.raises(Refusal) as refused:
        _from(tmp_path, f"{DYNAMIC}from switch_tf.configs import run\nrun.Run.train_step = 3\n")
    assert str(refused.value) == (f"{tmp_path}/mine.gin: Run doesn't have a parameter named 'train_step'. "
                                  "Did you mean 'train_steps'?")


def test_an_experiment_is_described_before_anything_is_made():
    described = Experiment.from_gin(RUN, MODEL_DIR="run", NUM_EXPERTS=4)
    assert (described.config.num_experts, described.run.model_dir, described.partitioner) == (4, "run", None)


def test_what_a_run_writes_describes_the_same_experiment(tmp_path):
    described = Experiment.from_gin([*LOCAL, "gin/layouts/expert.gin"], MODEL_DIR="run")
    placed = experiments.place_here(described)
    assert (described.layout.open_axes, placed.layout.mesh) == (["data"], {"data": 8})
    placed = dataclasses.replace(placed, run=dataclasses.replace(placed.run, vocabulary="t5", eval_batches=3),
                                 optimizer=Part("keras.optimizers.AdamW", {"learning_rate": 0.5}))
    (tmp_path / "operative_config.gin").write_text(placed.as_gin().text())
    again = Experiment.from_run(tmp_path)
    assert again.gin.macros["VOCABULARY"] == "t5" and again.run.eval_batches == 3
    assert again.run == placed.run and again.layout == described.layout
    assert again.optimizer == placed.optimizer
    assert dataclasses.replace(again, run=described.run, optimizer=described.optimizer) == described
    assert Experiment.from_run(tmp_path, TRAIN_STEPS=7).run.train_steps == 7
    assert type(again.make_objective()) is Objective


def test_an_experiment_of_python_is_written_as_gin(tmp_path):
    run = Run("run", "docs_corpus_span_corruption", {"inputs": 32, "targets": 16}, train_steps=4, batch_size=8)
    schedules = [Part(parts.RSQRT_DECAY, {"warmup_steps": steps}) for steps in (3, 5)]
    described = Experiment(SwitchConfig(d_ff=8), Layout(mesh_shape="data=2", rules=(("batch", "data"),)), run,
                           StepSettings(clip_norm=1.0),
                           optimizer=Part("switch_tf.optim.schedules.Cooldown", {"schedule": schedules}))
    (tmp_path / "again.gin").write_text(described.as_gin().text())
    again = Experiment.from_gin([str(tmp_path / "again.gin")])
    assert again == described and again.gin.macros["TRAIN_STEPS"] == 4


def test_a_part_that_replaces_another_of_its_name_inherits_nothing_from_it(tmp_path):
    described = Experiment.from_gin([*LOCAL, "gin/runs/distill.gin"], ["Adafactor.clip_threshold=2.0"], MODEL_DIR="run",
                                    TEACHER="teacher")
    changed = dataclasses.replace(described, optimizer=Part(parts.ADAFACTOR, {"learning_rate": 0.5}))
    (tmp_path / "again.gin").write_text(changed.as_gin().text())
    again = Experiment.from_gin([str(tmp_path / "again.gin")])
    assert again == changed and again.objective == described.objective
    two = [Part(parts.RSQRT_DECAY, {"base": 2.0, "warmup_steps": 3}), Part(parts.RSQRT_DECAY, {"warmup_steps": 5})]
    with pytest.raises(Refusal, match="One RsqrtDecay has base and another does not, .* give base to each"):
        dataclasses.replace(described, optimizer=Part(parts.ADAFACTOR, {"learning_rate": two})).as_gin()


def test_one_checkpoint_is_evaluated():
    with pytest.raises(Refusal, match="step must be best, last or a step with a checkpoint, not 'all'"):
        Experiment.from_gin(LOCAL, MODEL_DIR="run").evaluate("all")


@pytest.mark.parametrize("text", ["", "# nothing", "include 'gin/models/switch_tiny.gin'\n"])
def test_files_without_a_run_are_told_so(tmp_path, text):
    (tmp_path / "empty.gin").write_text(text)
    with pytest.raises(Refusal, match="empty.gin. Give a model .gin/models/switch_tiny.gin., a task"):
        Experiment.from_gin([str(tmp_path / "empty.gin")])


def test_the_parts_of_a_run_come_together():
    described = experiments.place_here(Experiment.from_gin(
        RUN, ["StepSettings.num_microbatches=2"], MODEL_DIR="run", BATCH_SIZE=64))
    assert described.run.batch_size == 64 and described.settings.num_microbatches == 2
    assert described.layout is described.partitioner.layout and described.layout.num_devices == 1
    first, second = described.make_model(), described.make_model()
    assert first is not second and first.config == described.config == second.config
    assert described.make_optimizer() is not described.make_optimizer()


def test_parts_that_do_not_go_together_are_refused_but_for_whoever_looks_for_those_that_do():
    described = Experiment.from_gin([*RUN, "gin/layouts/expert.gin"], MODEL_DIR="run", BATCH_SIZE=12)
    with pytest.raises(Refusal, match="BATCH_SIZE must be a multiple of 8"):
        experiments.place_on_devices(described, 8, "TPU")
    placed = experiments.place_on_devices(described, 8, "TPU", is_checked=False)
    assert placed.layout.mesh == {"data": 8} and placed.partitioner is None


def test_a_layout_for_other_devices_is_refused():
    described = Experiment.from_gin([*RUN, "gin/layouts/expert.gin"], MODEL_DIR="run", MESH_SHAPE="data=16")
    with pytest.raises(Refusal, match="is for 16 devices, but there are 8"):
        experiments.place_here(described)
