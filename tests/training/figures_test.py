import pytest

from switch_tf.training import figures


@pytest.mark.parametrize("unigram_loss", [None, 3.0, 5.8])
def test_the_untrained_models_loss_is_told_in_words_and_all_else_stays_in_sight(unigram_loss):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    start = {"step": 0, "eval/task/loss": 9.67}
    if unigram_loss:
        start["eval/task/unigram_loss"] = unigram_loss
    trained = [{"step": step, "train/cross_entropy": 5.0 - step / 100} for step in (50, 100)]
    (axes,) = figures._loss([start, *trained, {"step": 100, "eval/task/loss": 4.2}]).axes
    assert max(4.5, unigram_loss or 0) < axes.get_ylim()[1] < 9.67
    assert [text.get_text() for text in axes.texts] == ["step 0: 9.67"]
