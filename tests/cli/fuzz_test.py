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

from switch_tf.cli import main
from switch_tf.installation import doctor
from switch_tf.statuses import INTERRUPTED
from tests.cli.lines import TINY

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "hugging_face"
MACROS = """
    MODEL_DIR TRAIN_STEPS BATCH_SIZE SEED LOG_PERIOD EVAL_PERIOD CHECKPOINT_PERIOD INITIAL_CHECKPOINT ACTIVATION_DTYPE
    NUM_EXPERTS DROPOUT_RATE EXPERT_DROPOUT_RATE MIXTURE_OR_TASK_NAME TASK_FEATURE_LENGTHS MESH_SHAPE MODEL VOCABULARY
    NO_SUCH_MACRO"""
PARAMETERS = """
    SwitchConfig.d_model SwitchConfig.num_heads SwitchConfig.d_kv SwitchConfig.vocab_size
    SwitchConfig.train_capacity_factor SwitchConfig.routing_policy SwitchConfig.semantics SwitchConfig.group_size
    SwitchConfig.num_groups_multiple SwitchConfig.encoder_sparse_step SwitchConfig.num_decoder_layers
    SwitchConfig.activation SwitchConfig.no_such SwitchTransformer.config SwitchTransformer.dtype Run.pack
    Run.eval_batches Run.restart_changed_data StepSettings.clip_norm StepSettings.num_microbatches
    StepSettings.steps_per_call StepSettings.label_smoothing Layout.mesh_shape Layout.rules Layout.at_rest_rules
    Layout.backend RsqrtDecay.base RsqrtDecay.warmup_steps Adafactor.learning_rate Adafactor.decay_exponent
    Adafactor.no_such Trainer.optimizer Trainer.run Trainer.step_settings NoSuch.thing a.b.c.d"""
LITERALS = st.sampled_from((
    "0", "-1", "1", "8", "1e400", "-1e400", "0.5", "1e-300", "10**3", "99999999999999999999", "True", "None", "''",
    "'no'", "'float8'", "'data=4,model=2'", "'data=0'", "'/'", "'\\0'", "'gs://bucket/x'", "()", "[]", "{}", "(1, 2)",
    "{'inputs': 0}", "{'inputs': 64, 'targets': 20}", "{'inputs': 'x', 'targets': None}", "[('batch', 'data')]",
    "(('expert', 5),)", "eight", "", "'", "[1", "%NUM_EXPERTS", "%NO_SUCH", "%gin.REQUIRED", "@", "@NoSuch()",
    "@switch_config.SwitchConfig()", "@run.Run", "{1: {2: [3]}}", "b'x'", "1 2", "\n", "é", "lambda: 0", "nan",
    "5 # five"))
VALUES = LITERALS | st.integers(-(10**6), 10**6).map(repr) | st.floats().map(repr) | st.text(max_size=8).map(repr)


def _any(text):
    return st.sampled_from(text.split())


NAMES = _any(MACROS + PARAMETERS)
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
        return [*TINY.split(), "--gin_file=gin/layouts/single.gin"], ""
    words = TINY.split() if draw(st.integers(0, 3)) else draw(st.lists(_any(f"{TINY} --gin_file=nowhere.gin")))
    extra = draw(st.sampled_from((None, "MADE", "MADE", "MADE", "/dev/null", ".", "", "\0", "gin", "gin/runs/demo.gin",
                                  "gin/layouts/expert_model.gin", "gin/runs/finetune.gin")))
    text = "\n".join(draw(st.lists(LINES | st.text(max_size=10), max_size=4))) if extra == "MADE" else ""
    return [*words, *([f"--gin_file={extra}"] if extra is not None else [])], text


def _flags(names):
    values = _any("0 -1 1 2 x 1e9 3.5 99999999999") | st.text(max_size=6)
    flags = st.lists(st.builds("--{}={}".format, _any(f"{names} no_such"), values), max_size=2)
    return st.sampled_from((True, True, False)).flatmap(lambda is_plain: st.just([]) if is_plain else flags)


def _line(*choices, flags):
    """One word of each of the choices, or a list of words that a strategy of them makes, and flags."""
    words = st.tuples(*(_any(choice).map(lambda word: [word]) if isinstance(choice, str) else choice
                        for choice in choices))
    return st.builds(lambda words, flags: [*sum(words, []), *flags], words, _flags(flags))


def _few(text, count=1):
    """Some of the words, or empty ones."""
    return st.lists(_any(text) | st.just(""), max_size=count)


RUN = "--run=ran --run=ran --run=empty --run=nowhere --run="
SAMPLER = "--sampler=sample --sampler=beam --sampler=no_such"
STEP = f"{SAMPLER} --step=best --step=all"
OUTPUT = "--output=new --output=damaged --output= --output=/dev/null/x"
SAMPLING = "max_length temperature top_k top_p seed num_beams length_penalty num_results json"
COMMANDS = {
    "train": _flags("devices backend processes gin_search_paths json"),
    "verify-layout": _flags("devices backend steps"),
    "compile": _line("--topology=v5e:4x4 --topology=v5p:2x2x1 --topology=x --topology=v5e:0x4 --topology= "
                     "--topology=v5e:4x4x4x4",
                     "--full --compare=expert,data --compare=, --compare=nowhere --search --save=/ --save=saved --json",
                     flags="") | _flags("topology save compare"),
    "inspect": _line(_few("switch_tiny t5_small no_such . /dev/null gone.gin empty damaged list --list"),
                     flags="inputs_length targets_length json"),
    "tasks": _line(_few("docs_corpus_span_corruption_bytes glue glue_sst2 no_such train mc4_span_corruption.sw ."),
                   flags="split json"),
    "compare": _line(
        st.sampled_from((["--runs", "ran", "ran"], ["--runs", "ran", "empty"], ["--runs", "nowhere", "."], ["--runs"],
                         ["--gin_file=gin/comparisons/demo.gin"], ["--gin_file=gin/comparisons/demo.gin"])),
        st.lists(st.builds("--gin.{}={}".format, _any(
            "MODEL_DIR SEEDS Comparison.turn Comparison.seeds Comparison.variants Comparison.common "
            "Comparison.may_differ Comparison.unequal_work TRAIN_STEPS EVAL_PERIOD SEED"), VALUES), max_size=2),
        flags="output json"),
    "eval": _line(f"{RUN} --run=. --run=/dev/null", flags="step split examples output devices backend json run"),
    "infer": _line(RUN, "--input=- --input=MADE --input=gone.txt --input=. --interactive --score",
                   f"{SAMPLER} --output=MADE --field=", flags=f"step batch_size target_field {SAMPLING}"),
    "export": _line(RUN, OUTPUT, STEP, flags=f"step {SAMPLING}"),
    "serve": _line(RUN, "--port=0 --port=0 --port=99999 --host=nowhere.invalid --host= --host=\0", STEP,
                   flags=f"step port batch_size max_waiting max_request_bytes {SAMPLING}"),
    "convert": _line("--input=theirs --input=theirs --input=theirs --input=empty --input=damaged --input=nowhere "
                     "--input= --input=torn", f"{OUTPUT} --output=new --output=empty",
                     flags="to expert_capacity json"),
    "upcycle": _line("--from=theirs --from=ran --from=empty --from=damaged --from=nowhere --from=", OUTPUT,
                     flags="noise reinitialize gate_scale seed json"),
    "average": _line(RUN, "--last=1 --last=2 --last=x --last=", OUTPUT, flags="last json"),
    "shrink": _line("--from=ran --from=ran/checkpoints/step_00000001 --from=theirs --from=nowhere --from=", OUTPUT,
                    "--num_experts=2 --num_experts=0 --num_experts=x --merge", flags="num_experts json"),
    "vocabulary": _line(  # of two flags the last counts
        st.just(["--input=ran/text.txt", "--size=400", "--output=own.model"]),
        _few("--input=MADE --input=gone.txt --input= --input=. --size=400 --output=own.model --output=. --output= "
             "--output=gone/x --json --field=0 --field=", 4), flags="input size output field"),
    "doctor": _flags("json gin_file"),
}


@pytest.fixture
def faked(monkeypatch, tmp_path):
    """Nothing is trained, compiled or started, and devices are as many as a command asks for."""
    from switch_tf.aot import search
    from switch_tf.partitioning.partitioner import Partitioner
    from switch_tf.training import verification

    class Finished:
        progress = types.SimpleNamespace(say=print)
        partitioner = Partitioner()
        run = types.SimpleNamespace(train_steps=1, shown_examples=0)
        state = types.SimpleNamespace(batches=types.SimpleNamespace(is_stuck=False))

        __exit__ = advance = lambda self, *arguments: None

        def __enter__(self):
            return self

        def lost_process(self, reason):
            return reason

        def finish(self):
            return {"interrupted": False, "step": 1, "report": "r", "plot": "p"}

    monkeypatch.chdir(tmp_path)
    for name in ("empty", "damaged", "torn", "ran/checkpoints/step_00000001"):
        (tmp_path / name).mkdir(parents=True)
    included = "".join(f"include '{word.partition('=')[2]}'\n" for word in TINY.split())
    for name, text in {"damaged/checkpoint.json": "[]", "torn/config.json": "{", "ran/text.txt": "a text\n",
                       "ran/operative_config.gin": f"{included}MODEL_DIR = 'ran'\n"}.items():
        (tmp_path / name).write_text(text)
    shutil.copytree(GOLDEN / "switch", tmp_path / "theirs")
    same = verification.Difference(0.0, "nowhere")

    def load_text_model(*arguments):
        raise Loaded

    for name, fake in {
        "evaluation.split_evaluator.CheckpointEvaluator": lambda *arguments: types.SimpleNamespace(
            output="o", close=lambda: None, evaluate=lambda path: {"step": 1, "tasks": {"x": {}}, "average": None,
                                               "num_examples": {}}),
        "installation.quiet.import_tensorflow": lambda num_cpu_devices=None: None,
        # Reading data takes a second each time; tests/data/examples_test.py is about it.
        "data.check_examples": lambda description: None,
        "data.examples": lambda description, count: [],
        "data.get_dataset": lambda description: tf.data.Dataset.range(1),
        "training.trainer.Trainer.start": lambda self, text="", progress=None, clock=None: Finished(),
        "comparison.driver.take_turns": lambda *arguments: False,
        "training.processes._wait": lambda children: 0,
        "training.processes.subprocess.Popen": lambda *arguments, **options: types.SimpleNamespace(
            stderr=[], poll=lambda: 0),
        "training.verification.Twin": lambda *arguments: types.SimpleNamespace(train=lambda *arguments: None),
        "training.verification.compare": lambda *arguments: verification.Verification(
            same, same, same, same, [(1.0, 1.0)]),
        "aot.estimate.answer": lambda *arguments: ({"fits": True}, {}),
        "aot.search.search": lambda described, ask: (None, {search.Choice("data=1", 1, 1, 1.0): {"fits": True}}),
        "aot.search.ranking": lambda *arguments: "",
        "aot.answers.cache_file": lambda *question: tmp_path / "answer.json",
        "aot.answers.describe": str, "aot.answers.write": lambda *arguments: True, "aot.answers.table": str,
        "aot.answers.ask": lambda questions: dict.fromkeys(questions, {"failed": "not compiled"}),
        "cli.answering.folders": types.SimpleNamespace(check_size=load_text_model),
        "sentencepiece_training.train_file": lambda *arguments: None,
        "sentencepiece_training.characters_per_token": lambda *arguments: 4.0,
        "installation.doctor.run_python": lambda check, *_: doctor.Finding(check, "works"),
    }.items():
        monkeypatch.setattr(f"switch_tf.{name}", fake)
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


@pytest.mark.parametrize("command, count", {
    "train": 30, "verify-layout": 20, "compile": 20, "compare": 20, "inspect": 40, "tasks": 20, "eval": 25, "infer": 40,
    "export": 20, "serve": 20, "convert": 20, "upcycle": 15, "average": 10, "shrink": 10, "vocabulary": 30,
    "doctor": 20}.items())
def test_wrong_values_are_answered_with_a_sentence(command, count, capsys, faked):
    assert _fuzz(command, capsys, faked, count) > count // 2  # most are wrong


@pytest.mark.exhaustive
@pytest.mark.parametrize("command", COMMANDS)
def test_many_wrong_values_are_answered_with_a_sentence(command, capsys, faked):
    count = 20 if command == "doctor" else 1000
    assert _fuzz(command, capsys, faked, count) > count // 2
