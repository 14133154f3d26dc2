"""Every command with wrong values prints a sentence or continues to a fake, and never fails.

What a command does once it has read and checked its arguments (train, compile, look at the machine) is not done.
"""

import collections
import json
import pathlib
import shutil
import types

import hypothesis
import pytest
import tensorflow as tf
from hypothesis import strategies as st

from switch_tf import sentencepiece_training
from switch_tf.cli import answering, main
from switch_tf.installation import doctor, quiet
from switch_tf.statuses import INTERRUPTED
from switch_tf.training import processes

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "hugging_face"
TINY = ["gin/models/switch_tiny.gin", "gin/tasks/docs_corpus_bytes.gin", "gin/runs/pretrain.gin"]
MACROS = ("MODEL_DIR", "TRAIN_STEPS", "BATCH_SIZE", "SEED", "LOG_PERIOD", "EVAL_PERIOD", "CHECKPOINT_PERIOD",
          "INITIAL_CHECKPOINT", "ACTIVATION_DTYPE", "NUM_EXPERTS", "DROPOUT_RATE", "EXPERT_DROPOUT_RATE",
          "MIXTURE_OR_TASK_NAME", "TASK_FEATURE_LENGTHS", "MESH_SHAPE", "MODEL", "VOCABULARY", "NO_SUCH_MACRO")
PARAMETERS = ("SwitchConfig.d_model", "SwitchConfig.num_heads", "SwitchConfig.d_kv", "SwitchConfig.vocab_size",
              "SwitchConfig.train_capacity_factor", "SwitchConfig.routing_policy", "SwitchConfig.semantics",
              "SwitchConfig.group_size", "SwitchConfig.num_groups_multiple", "SwitchConfig.encoder_sparse_step",
              "SwitchConfig.num_decoder_layers", "SwitchConfig.activation", "SwitchConfig.no_such",
              "SwitchTransformer.config", "SwitchTransformer.dtype", "Run.pack", "Run.eval_batches",
              "Run.restart_changed_data", "StepSettings.clip_norm", "StepSettings.num_microbatches",
              "StepSettings.steps_per_call", "StepSettings.label_smoothing", "Layout.mesh_shape", "Layout.rules",
              "Layout.at_rest_rules", "Layout.backend", "RsqrtDecay.base", "RsqrtDecay.warmup_steps",
              "Adafactor.learning_rate", "Adafactor.decay_exponent", "Adafactor.no_such", "Trainer.optimizer",
              "Trainer.run", "Trainer.step_settings", "NoSuch.thing", "a.b.c.d")
LITERALS = st.sampled_from((
    "0", "-1", "1", "8", "1e400", "-1e400", "0.5", "1e-300", "10**3", "99999999999999999999", "True", "None", "''",
    "'no'", "'float8'", "'data=4,model=2'", "'data=0'", "'/'", "'\\0'", "'gs://bucket/x'", "()", "[]", "{}", "(1, 2)",
    "{'inputs': 0}", "{'inputs': 64, 'targets': 20}", "{'inputs': 'x', 'targets': None}", "[('batch', 'data')]",
    "(('expert', 5),)", "eight", "", "'", "[1", "%NUM_EXPERTS", "%NO_SUCH", "%gin.REQUIRED", "@", "@NoSuch()",
    "@switch_config.SwitchConfig()", "@run.Run", "{1: {2: [3]}}", "b'x'", "1 2", "\n", "é", "lambda: 0", "nan",
    "5 # five"))
VALUES = LITERALS | st.integers(-(10**6), 10**6).map(repr) | st.floats().map(repr) | st.text(max_size=8).map(repr)
NAMES = st.sampled_from(MACROS + PARAMETERS)
BINDINGS = st.integers(0, 19).flatmap(  # one in ten binds no name that there is
    lambda kind: st.text(max_size=12).map("--gin.{}".format) if kind == 0 else st.builds(
        "--gin.{}={}".format, st.text(max_size=8) if kind == 1 else NAMES, VALUES))
LINES = st.sampled_from((
    "", "# words", "include 'SELF'", "include 'nowhere.gin'", "include 5", "import no.such.module",
    "from __gin__ import dynamic_registration", "from switch_tf import nothing",
    "from switch_tf.configs import switch_config",
    "switch_config.SwitchConfig:\n  d_model = 8", "switch_config.SwitchConfig:\n d_model 8", "A = %B\nB = %A", "A = %A",
    "X = 1",
    "X = (", "X = '''", "x/y/z = 3", "= 4", "switch_config.SwitchConfig.d_model = @switch_config.SwitchConfig()",
    "\0", "\t:",
    "include 'gin/models/switch_tiny.gin'", "include 'gin/runs/pretrain.gin'", "MODEL_DIR = 'x'"))


@st.composite
def _files(draw):
    """The arguments of some gin files: mostly those of a run, then shipped ones, missing ones, and made-up ones."""
    if draw(st.sampled_from((True, True, True, False))):
        return [f"--gin_file={file}" for file in (*TINY, "gin/layouts/single.gin")], ""
    files = list(TINY) if draw(st.integers(0, 3)) else draw(st.lists(st.sampled_from((*TINY, "nowhere.gin"))))
    extra = draw(st.sampled_from((None, "MADE", "MADE", "MADE", "/dev/null", ".", "", "\0", "gin", "gin/runs/demo.gin",
                                  "gin/layouts/expert_model.gin", "gin/runs/finetune.gin")))
    text = "\n".join(draw(st.lists(LINES | st.text(max_size=10), max_size=4))) if extra == "MADE" else ""
    return [f"--gin_file={file}" for file in (*files, *([extra] if extra is not None else []))], text


def _flags(*names):
    values = st.sampled_from(("0", "-1", "1", "2", "x", "", "1e9", "3.5", "99999999999")) | st.text(max_size=6)
    flags = st.lists(st.builds("--{}={}".format, st.sampled_from((*names, "no_such")), values), max_size=2)
    return st.sampled_from((True, True, False)).flatmap(lambda is_plain: st.just([]) if is_plain else flags)


COMMANDS = {
    "train": _flags("devices", "backend", "processes", "gin_search_paths", "json"),
    "verify-layout": _flags("devices", "backend", "steps"),
    "compile": st.tuples(
        st.sampled_from(["--topology=v5e:4x4", "--topology=v5p:2x2x1", "--topology=x", "--topology=v5e:0x4",
                         "--topology=", "--topology=v5e:4x4x4x4"]),
        st.sampled_from(["--full", "--compare=expert,data", "--compare=,", "--compare=nowhere", "--search", "--save=/",
                         "--save=saved", "--json"])).map(list) | _flags("topology", "save", "compare"),
    "inspect": st.lists(st.sampled_from(["switch_tiny", "t5_small", "no_such", ".", "/dev/null", "gone.gin", "empty",
                                         "damaged", "list", "--list", ""]), max_size=1).flatmap(
        lambda what: _flags("inputs_length", "targets_length", "json").map(lambda flags: what + flags)),
    "tasks": st.lists(st.sampled_from(["docs_corpus_span_corruption_bytes", "glue", "glue_sst2", "no_such", "", "train",
                                       "mc4_span_corruption.sw", "."]), max_size=1).flatmap(
        lambda name: _flags("split", "json").map(lambda flags: name + flags)),
    "compare": st.tuples(
        st.sampled_from([["--runs", "ran", "ran"], ["--runs", "ran", "empty"], ["--runs", "nowhere", "."], ["--runs"],
                         ["--gin_file=gin/comparisons/demo.gin"], ["--gin_file=gin/comparisons/demo.gin"]]),
        st.lists(st.builds("--gin.{}={}".format, st.sampled_from((
            "MODEL_DIR", "SEEDS", "Comparison.turn", "Comparison.seeds", "Comparison.variants", "Comparison.common",
            "Comparison.may_differ", "Comparison.unequal_work", "TRAIN_STEPS", "EVAL_PERIOD", "SEED")), VALUES),
            max_size=2)).flatmap(lambda words: _flags("output", "json").map(
                lambda flags: [*words[0], *words[1], *flags])),
    "eval": st.sampled_from(["ran", "ran", "ran", "empty", "nowhere", "", ".", "/dev/null"]).flatmap(
        lambda folder: _flags("step", "split", "examples", "output", "devices", "backend", "json", "run").map(
            lambda flags: [f"--run={folder}", *flags])),
    "infer": st.tuples(
        st.sampled_from(["--run=ran", "--run=ran", "--run=empty", "--run=nowhere", "--run="]),
        st.sampled_from(["--input=-", "--input=MADE", "--input=gone.txt", "--input=.", "--interactive", "--score"]),
        st.sampled_from(["--sampler=sample", "--sampler=beam", "--sampler=no_such", "--output=MADE", "--field="]),
    ).map(list).flatmap(lambda words: _flags(
        "step", "batch_size", "max_length", "temperature", "top_k", "top_p", "seed", "num_beams", "length_penalty",
        "num_results", "target_field", "json").map(lambda flags: words + flags)),
    "export": st.tuples(
        st.sampled_from(["--run=ran", "--run=ran", "--run=empty", "--run=nowhere", "--run="]),
        st.sampled_from(["--output=new", "--output=new", "--output=damaged", "--output=", "--output=/dev/null/x"]),
        st.sampled_from(["--sampler=sample", "--sampler=beam", "--sampler=no_such", "--step=best", "--step=all"]),
    ).map(list).flatmap(lambda words: _flags(
        "step", "max_length", "temperature", "top_k", "top_p", "seed", "num_beams", "length_penalty", "num_results",
        "json").map(lambda flags: words + flags)),
    "serve": st.tuples(
        st.sampled_from(["--run=ran", "--run=ran", "--run=empty", "--run=nowhere", "--run="]),
        st.sampled_from(["--port=0", "--port=0", "--port=99999", "--host=nowhere.invalid", "--host=", "--host=\0"]),
        st.sampled_from(["--sampler=sample", "--sampler=beam", "--sampler=no_such", "--step=best", "--step=all"]),
    ).map(list).flatmap(lambda words: _flags(
        "step", "port", "batch_size", "max_waiting", "max_request_bytes", "max_length", "temperature", "top_k", "top_p",
        "seed", "num_beams", "length_penalty", "num_results", "json").map(lambda flags: words + flags)),
    "convert": st.tuples(
        st.sampled_from(["--input=theirs", "--input=theirs", "--input=theirs", "--input=empty", "--input=damaged",
                         "--input=nowhere", "--input=", "--input=torn"]),
        st.sampled_from(["--output=new", "--output=new", "--output=damaged", "--output=empty", "--output=",
                         "--output=/dev/null/x"]),
    ).map(list).flatmap(lambda words: _flags("to", "expert_capacity", "json").map(lambda flags: words + flags)),
    "upcycle": st.tuples(
        st.sampled_from(["--from=theirs", "--from=ran", "--from=empty", "--from=damaged", "--from=nowhere", "--from="]),
        st.sampled_from(["--output=new", "--output=damaged", "--output=", "--output=/dev/null/x"]),
    ).map(list).flatmap(lambda words: _flags("noise", "reinitialize", "gate_scale", "seed", "json").map(
        lambda flags: words + flags)),
    "average": st.tuples(
        st.sampled_from(["--run=ran", "--run=ran", "--run=empty", "--run=nowhere", "--run="]),
        st.sampled_from(["--last=1", "--last=2", "--last=x", "--last="]),
        st.sampled_from(["--output=new", "--output=damaged", "--output=", "--output=/dev/null/x"]),
    ).map(list).flatmap(lambda words: _flags("last", "json").map(lambda flags: words + flags)),
    "shrink": st.tuples(
        st.sampled_from(["--from=ran", "--from=ran/checkpoints/step_00000001", "--from=theirs", "--from=nowhere",
                         "--from="]),
        st.sampled_from(["--output=new", "--output=damaged", "--output=", "--output=/dev/null/x"]),
        st.sampled_from(["--num_experts=2", "--num_experts=0", "--num_experts=x", "--merge"]),
    ).map(list).flatmap(lambda words: _flags("num_experts", "json").map(lambda flags: words + flags)),
    "vocabulary": st.lists(st.sampled_from(["--input=MADE", "--input=gone.txt", "--input=", "--input=.", "--size=400",
                                            "--output=own.model", "--output=.", "--output=", "--output=gone/x",
                                            "--json", "--field=0", "--field="]), max_size=4).flatmap(
        lambda words: _flags("input", "size", "output", "field").map(lambda flags: [  # of two flags the last counts
            "--input=ran/text.txt", "--size=400", "--output=own.model", *words, *flags])),
    "doctor": _flags("json", "gin_file"),
}


@pytest.fixture
def faked(monkeypatch, tmp_path):
    """Nothing is trained, compiled or started, and devices are as many as a command asks for."""
    from switch_tf import data
    from switch_tf.aot import answers, estimate, search
    from switch_tf.comparison import driver
    from switch_tf.evaluation import split_evaluator
    from switch_tf.partitioning.partitioner import Partitioner
    from switch_tf.training import verification
    from switch_tf.training.trainer import Trainer

    class Finished:
        progress = types.SimpleNamespace(say=print)
        partitioner = Partitioner()
        run = types.SimpleNamespace(train_steps=1, shown_examples=0)
        state = types.SimpleNamespace(batches=types.SimpleNamespace(is_stuck=False))

        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

        def advance(self, *arguments):
            pass

        def lost_process(self, reason):
            return reason

        def finish(self):
            return {"interrupted": False, "step": 1, "report": "r", "plot": "p"}

    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "checkpoint.json").write_text("[]")
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "config.json").write_text("{")
    shutil.copytree(GOLDEN / "switch", tmp_path / "theirs")
    (tmp_path / "ran" / "checkpoints" / "step_00000001").mkdir(parents=True)
    (tmp_path / "ran" / "text.txt").write_text("the text of a vocabulary\n")
    (tmp_path / "ran" / "operative_config.gin").write_text(
        "".join(f"include '{file}'\n" for file in TINY) + "MODEL_DIR = 'ran'\n")
    monkeypatch.setattr(split_evaluator, "CheckpointEvaluator", lambda *arguments: types.SimpleNamespace(
        output="output", close=lambda: None, evaluate=lambda path: {"step": 1, "tasks": {"x": {}}, "average": None}))
    monkeypatch.setattr(quiet, "import_tensorflow", lambda num_cpu_devices=None: None)
    # Reading data takes a second each time; tests/data/examples_test.py is about it.
    monkeypatch.setattr(data, "check_examples", lambda description: None)
    monkeypatch.setattr(data, "examples", lambda description, count: [])
    monkeypatch.setattr(data, "get_dataset", lambda description: tf.data.Dataset.range(1))
    monkeypatch.setattr(Trainer, "start", lambda self, text="", progress=None: Finished())
    monkeypatch.setattr(driver, "take_turns", lambda *arguments: False)
    monkeypatch.setattr(processes, "_wait", lambda children: 0)
    monkeypatch.setattr(processes.subprocess, "Popen",
                        lambda *arguments, **options: types.SimpleNamespace(stderr=[], poll=lambda: 0))
    best = search.Choice("data=1", 1, 1, 1.0)
    same = verification.Difference(0.0, "nowhere")
    monkeypatch.setattr(verification, "Twin", lambda *arguments: types.SimpleNamespace(train=lambda *arguments: None))
    monkeypatch.setattr(verification, "compare", lambda *arguments: verification.Verification(
        same, same, same, same, [(1.0, 1.0)]))
    monkeypatch.setattr(estimate, "answer", lambda *arguments: ({"fits": True}, {}))
    monkeypatch.setattr(search, "search", lambda described, ask: (None, {best: {"fits": True}}))
    monkeypatch.setattr(search, "ranking", lambda *arguments: "")
    monkeypatch.setattr(answers, "cache_file", lambda *question: tmp_path / "answer.json")
    monkeypatch.setattr(answers, "describe", str)
    monkeypatch.setattr(answers, "write", lambda *arguments: True)
    monkeypatch.setattr(answers, "ask", lambda questions: dict.fromkeys(questions, {"failed": "not compiled"}))
    monkeypatch.setattr(answers, "table", str)

    def load_text_model(*arguments):
        raise Loaded

    monkeypatch.setattr(answering, "_restore", load_text_model)
    monkeypatch.setattr(sentencepiece_training, "train_file", lambda *arguments: None)
    monkeypatch.setattr(sentencepiece_training, "characters_per_token", lambda *arguments: 4.0)
    monkeypatch.setattr(doctor, "run_python", lambda code: ("[]", ""))
    yield tmp_path


class Loaded(Exception):
    """In place of a model that would be loaded, to say that the command line is right."""


def _try(command, words, capsys):
    """Runs a command line: a sentence on standard error and its status, or an end without a fault. Returns the status.
    """
    try:
        status = main.main([command, *words])
    except SystemExit as exit_:  # argparse's own refusal
        status = exit_.code
    except Loaded:
        capsys.readouterr()
        return 0
    out, err = capsys.readouterr()
    assert status in (0, 1, 2) or command == "compare" and status == INTERRUPTED, words
    assert "Traceback" not in err, words
    if status == 2:
        assert any(line.startswith((f"switch-tf {command}: ", "switch-tf: ")) for line in err.split("\n")), words
    if status == 0 and "--json" in words:
        json.loads(out.splitlines()[-1], parse_constant=lambda name: pytest.fail(f"{name} in {words}"))
    return status


SETTINGS = {"deadline": None, "derandomize": True, "database": None, "phases": [hypothesis.Phase.generate],
            "suppress_health_check": list(hypothesis.HealthCheck)}


def _fuzz(command, capsys, folder, count):
    """Tries `count` command lines; returns how many were refused."""
    takes_gin = command not in ("doctor", "convert", "vocabulary", "compare", "average", "shrink")  # or its own files
    statuses = collections.Counter()

    @hypothesis.settings(max_examples=count, **SETTINGS)
    @hypothesis.given(_files(), st.lists(BINDINGS, max_size=2), COMMANDS[command], st.integers(0, 5))
    def check(files, bindings, flags, choice):
        words, text = files
        (folder / "MADE").write_text(text.replace("SELF", "MADE"))
        shutil.rmtree(folder / "new", ignore_errors=True)
        own = ["--gin.MODEL_DIR='run'"] if choice and command == "train" else []
        if command == "compile" and choice and not any("--topology" in flag for flag in flags):
            own += ["--topology=v5e:4x4"]
        if command in ("inspect", "tasks") and choice > 2 or not takes_gin:
            words = []
        if command in ("eval", "infer", "export", "serve") and choice:  # a run folder has gin files of its own
            words, bindings = [], bindings[:choice % 2]
        statuses[_try(command, [*words, *own, *bindings, *flags], capsys)] += 1

    check()
    with capsys.disabled():
        print(f"\n{command}: {statuses.total()} command lines, {statuses[2]} refused")
    return statuses[2]


@pytest.mark.parametrize(("command", "count"), [
    ("train", 30), ("verify-layout", 20), ("compile", 20), ("compare", 20), ("inspect", 40), ("tasks", 20),
    ("eval", 25), ("infer", 40), ("export", 20), ("serve", 20), ("convert", 20), ("upcycle", 15),
    ("average", 10), ("shrink", 10), ("vocabulary", 30), ("doctor", 20)])
def test_wrong_values_are_answered_with_a_sentence(command, count, capsys, faked):
    assert _fuzz(command, capsys, faked, count) > count // 2  # most are wrong


@pytest.mark.exhaustive
@pytest.mark.parametrize("command", COMMANDS)
def test_many_wrong_values_are_answered_with_a_sentence(command, capsys, faked):
    count = 20 if command == "doctor" else 1000
    assert _fuzz(command, capsys, faked, count) > count // 2
