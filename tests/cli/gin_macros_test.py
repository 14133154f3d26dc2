"""Macros: used and unused, with and without a value, and those that only a function of the user's own reads."""

import gin
import pytest

from switch_tf.cli import gin_files, gin_macros
from switch_tf.refusals import Refusal

RUN = ["gin/models/switch_tiny.gin", "gin/tasks/docs_corpus.gin", "gin/runs/pretrain.gin"]
DYNAMIC = "from __gin__ import dynamic_registration\n"
ADAM = DYNAMIC + """import keras
from switch_tf.training import trainer
trainer.Trainer.optimizer = @keras.optimizers.AdamW()
"""


@pytest.fixture
def parse(tmp_path, monkeypatch):
    """Parses a run with a file of the user's own, beside which lies a module `my_metrics`."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_metrics.py").write_text("def recall(targets, predictions, k=1):\n    return {}\n")

    def parse(text, *bindings):
        (tmp_path / "mine.gin").write_text(text)
        gin_files.parse([*RUN, str(tmp_path / "mine.gin")], ["MODEL_DIR='run'", *bindings])
        gin_macros.check_read(bindings)

    return parse


def test_a_macro_that_only_a_metric_reads_is_accepted(parse):
    parse(DYNAMIC + "import my_metrics\nDEPTH = 1\nmy_metrics.recall.k = %DEPTH\n", "DEPTH=5")
    assert gin_macros.made("DEPTH") == 5


def test_a_macro_that_another_optimizer_does_not_read_is_refused(parse):
    with pytest.raises(Refusal, match="LEARNING_RATE is set, but no part of this run reads it"):
        parse(ADAM, "LEARNING_RATE=0.001")
    parse(ADAM + "keras.optimizers.AdamW.learning_rate = %LEARNING_RATE\n", "LEARNING_RATE=0.001")


def test_a_macro_that_is_read_through_another_is_accepted(parse):
    parse(DYNAMIC + "RATE = 0.5\nLEARNING_RATE = %RATE\n", "RATE=0.25")
    assert gin_macros.made("LEARNING_RATE") == 0.25


def test_a_macro_counts_as_used_although_a_later_statement_replaces_the_use(parse):
    parse(DYNAMIC + "from switch_tf import config\nconfig.SwitchConfig.dropout_rate = 0.5\n")
    assert gin.query_parameter("SwitchConfig.dropout_rate") == 0.5


@pytest.mark.parametrize("text, sentence", [
    ("SEED = %SEED", "SEED stands for itself: SEED = %SEED."),
    ("SEED = [1, {'a': %TRAIN_STEPS}]\nTRAIN_STEPS = %SEED", "stands for itself"),
    ("TRAIN_STEP = 1", "TRAIN_STEP is set but nothing uses it. Did you mean 'TRAIN_STEPS'?"),
    ("SEED = %NO_SUCH", "NO_SUCH has no value; add it: --gin.NO_SUCH=VALUE."),
    ("SEED = %gin.REQUIRED", "SEED has no value; set it"),
])
def test_what_gin_would_find_late_or_never_is_refused(parse, text, sentence):
    with pytest.raises(Refusal) as refused:
        parse(f"{DYNAMIC}{text}\n")
    assert sentence in str(refused.value)
