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
from tests.cli.lines import TINY

TRAIN = (f"train {TINY} --gin.MODEL_DIR='run' --gin.TRAIN_STEPS=1 --gin.EVAL_PERIOD=0 --gin.BATCH_SIZE=8 "
         "--gin.SwitchConfig.num_encoder_layers=1 --gin.SwitchConfig.num_decoder_layers=1")


@pytest.fixture(autouse=True)
def unchecked_data(monkeypatch, tmp_path):
    """Starts that do not read an example first, which takes a second; tests/data/examples_test.py is about it."""
    monkeypatch.setattr("switch_tf.data.check_examples", lambda description: None)
    monkeypatch.chdir(tmp_path)


def test_a_bug_within_a_layer_shows_its_traceback_and_asks_for_a_report(monkeypatch, call):
    def plant(self, *arguments, **named):
        raise ValueError("a planted bug")

    monkeypatch.setattr(FeedForward, "call", plant)
    with pytest.raises(ValueError, match="a planted bug") as raised:
        call(TRAIN)
    shown = traceback.format_exception(raised.value)
    assert shown[0] == "Traceback (most recent call last):\n" and "in plant" in "".join(shown)
    assert shown[-1].startswith("This is a bug of switch_tf and not your mistake: please report it")


def test_a_refusal_within_a_layer_is_one_sentence(monkeypatch, call):
    def refuse(self, *arguments, **named):
        raise Refusal("A layer refuses its inputs.")

    monkeypatch.setattr(FeedForward, "call", refuse)
    assert call(TRAIN, status=2)[1].splitlines()[-1] == "switch-tf train: A layer refuses its inputs."


def _refused_by(cause):
    try:
        raise Refusal("It failed.") from cause
    except Refusal as refusal:
        return refusal


@pytest.mark.parametrize(("failure", "status"), [
    (train_step.Divergence("It failed."), 3), (_refused_by(OSError(errno.EIO, "Input/output error")), 4)])
def test_the_status_tells_how_a_run_ended(monkeypatch, call, failure, status):
    def fail(self, *arguments):
        raise failure

    monkeypatch.setattr(loop.Training, "_begin", fail)  # before a step is traced, which takes as long as the rest
    assert call(TRAIN, status=status)[1].splitlines()[-1] == "switch-tf train: It failed."


def test_the_help_names_the_statuses(capsys):
    with pytest.raises(SystemExit):
        main.main(["train", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert all(f"{status}: {meaning}" in shown for status, meaning in statuses.MEANINGS.items())


def test_the_docs_name_the_statuses():
    rows = re.findall(r"^\| (\d+) \|", (pathlib.Path(__file__).parents[2] / "docs" / "training.md").read_text(), re.M)
    assert [int(status) for status in rows] == list(statuses.MEANINGS)


def test_the_end_of_a_run_compares_held_out_losses():
    text = report.describe_summary({"step": 20, "report": "r.html", "plot": "l.png", "train/tokens_per_second": 1234.5,
                           "eval/task/loss": {"first": 8.0, "last": 4.0, "best": 3.5, "first_step": 0, "last_step": 20,
                                              "best_step": 10},
                           "eval/task/unigram_loss": 6.0})
    assert ("eval/task/loss: 8.0000 at step 0, 4.0000 at step 20, best 3.5000 at step 10 "
            "(the last 50% of the first)") in text
    assert "eval/task/unigram_loss: 6.0000" in text
    assert "1,234 tokens/s" in text
