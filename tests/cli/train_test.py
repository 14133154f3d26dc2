import errno
import pathlib
import re
import traceback

import pytest

from switch_tf import statuses
from switch_tf.cli import main
from switch_tf.layers.feed_forward import FeedForward
from switch_tf.refusals import Refusal
from switch_tf.reporting import report
from switch_tf.training import loop, train_step

RUN = [f"--gin_file=gin/{kind}.gin" for kind in ("models/switch_tiny", "tasks/docs_corpus_bytes", "runs/pretrain")]


@pytest.mark.parametrize(("bindings", "message"), [
    (["--gin.SwitchConfig.num_heads=0"], "num_heads must be an integer of at least 1, not 0."),
    (["--gin.BATCH_SIZE=9"], "Use a batch of 8 or 12 sequences, or num_groups_multiple=2."),
    (["--gin.MIXTURE_OR_TASK_NAME='docs_corpus_span_coruption'"], "docs_corpus_span_corruption"),
    (["--gin.SwitchConfig.vocab_size=16"], "vocab_size 16"),
    (["--gin.ACTIVATION_DTYPE='float8'"], "ACTIVATION_DTYPE must be one of 'auto', 'float32', 'bfloat16'"),
    (["--gin.INITIAL_CHECKPOINT='nowhere'"], "INITIAL_CHECKPOINT must name a run folder"),
    (["--gin.StepSettings.clip_norm=-1"], "clip_norm must be a number above 0"),
    (["--gin.MODEL_DIR='file/run'"], "MODEL_DIR 'file/run' cannot be written"),
])
def test_mistakes_are_one_sentence_and_write_nothing(capsys, tmp_path, monkeypatch, bindings, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    assert main.main(["train", *RUN, "--gin.MODEL_DIR='run'", *bindings]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("switch-tf train: ")
    assert error.count("\n") == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_a_learning_rate_that_another_optimizer_does_not_read_is_refused(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "adam.gin").write_text("from __gin__ import dynamic_registration\nimport keras\n"
                                       "from switch_tf.training import trainer\n"
                                       "trainer.Trainer.optimizer = @keras.optimizers.AdamW()\n")
    words = ["train", *RUN, "--gin_file=adam.gin", "--gin.MODEL_DIR='run'", "--gin.LEARNING_RATE=0.001"]
    assert main.main(words) == 2
    assert "LEARNING_RATE is set, but no part of this run reads it" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


SMALL = ["--gin.TRAIN_STEPS=1", "--gin.EVAL_PERIOD=0", "--gin.BATCH_SIZE=8", "--gin.SwitchConfig.num_encoder_layers=1",
         "--gin.SwitchConfig.num_decoder_layers=1"]


@pytest.fixture
def unchecked_data(monkeypatch):
    """Starts that do not read an example first, which takes a second; tests/data/examples_test.py is about it."""
    monkeypatch.setattr("switch_tf.data.check_examples", lambda description: None)


@pytest.mark.usefixtures("unchecked_data")
def test_a_bug_within_a_layer_shows_its_traceback_and_asks_for_a_report(tmp_path, monkeypatch):
    def plant(self, *arguments, **named):
        raise ValueError("a planted bug")

    monkeypatch.setattr(FeedForward, "call", plant)
    with pytest.raises(ValueError, match="a planted bug") as raised:
        main.main(["train", *RUN, f"--gin.MODEL_DIR='{tmp_path / 'run'}'", *SMALL])
    shown = traceback.format_exception(raised.value)
    assert shown[0] == "Traceback (most recent call last):\n" and "in plant" in "".join(shown)
    assert shown[-1].startswith("This is a bug of switch_tf and not your mistake: please report it")


@pytest.mark.usefixtures("unchecked_data")
def test_a_refusal_within_a_layer_is_one_sentence(tmp_path, monkeypatch, capsys):
    def refuse(self, *arguments, **named):
        raise Refusal("A layer refuses its inputs.")

    monkeypatch.setattr(FeedForward, "call", refuse)
    assert main.main(["train", *RUN, f"--gin.MODEL_DIR='{tmp_path / 'run'}'", *SMALL]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == "switch-tf train: A layer refuses its inputs."


def _refused_by(cause):
    try:
        raise Refusal("It failed.") from cause
    except Refusal as refusal:
        return refusal


@pytest.mark.usefixtures("unchecked_data")
@pytest.mark.parametrize(("failure", "status"), [
    (train_step.Divergence("It failed."), 3), (_refused_by(OSError(errno.EIO, "Input/output error")), 4)])
def test_the_status_tells_how_a_run_ended(tmp_path, monkeypatch, capsys, failure, status):
    def fail(self, *arguments):
        raise failure

    monkeypatch.setattr(loop.Training, "_begin", fail)  # before a step is traced, which takes as long as the rest
    assert main.main(["train", *RUN, f"--gin.MODEL_DIR='{tmp_path / 'run'}'", *SMALL]) == status
    assert capsys.readouterr().err.splitlines()[-1] == "switch-tf train: It failed."


def test_the_help_names_the_statuses(capsys):
    with pytest.raises(SystemExit):
        main.main(["train", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert all(f"{status}: {meaning}" in shown for status, meaning in statuses.MEANINGS.items())


def test_the_docs_name_the_statuses():
    rows = re.findall(r"^\| (\d+) \|", (pathlib.Path(__file__).parents[2] / "docs" / "training.md").read_text(), re.M)
    assert [int(status) for status in rows] == list(statuses.MEANINGS)


def test_without_gin_files_the_three_kinds_are_named(capsys):
    assert main.main(["train"]) == 2
    assert "a model (gin/models/switch_tiny.gin), a task (gin/tasks/docs_corpus.gin)" in capsys.readouterr().err


def test_the_end_of_a_run_compares_held_out_losses():
    text = report.describe_summary({"step": 20, "report": "r.html", "plot": "l.png", "train/tokens_per_second": 1234.5,
                           "eval/task/loss": {"first": 8.0, "last": 4.0, "best": 3.5, "first_step": 0, "last_step": 20,
                                              "best_step": 10},
                           "eval/task/unigram_loss": 6.0})
    assert ("eval/task/loss: 8.0000 at step 0, 4.0000 at step 20, best 3.5000 at step 10 "
            "(the last 50% of the first)") in text
    assert "eval/task/unigram_loss: 6.0000" in text
    assert "1,234 tokens/s" in text
