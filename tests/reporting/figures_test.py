import pytest

from switch_tf.reporting import report


@pytest.mark.parametrize("unigram_loss", [None, 3.0, 5.8])
def test_the_untrained_models_loss_is_told_in_words_and_all_else_stays_in_sight(unigram_loss):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    start = {"step": 0, "eval/task/loss": 9.67}
    if unigram_loss:
        start["eval/task/unigram_loss"] = unigram_loss
    trained = [{"step": step, "train/cross_entropy": 5.0 - step / 100} for step in (50, 100)]
    (axes,) = report._loss([start, *trained, {"step": 100, "eval/task/loss": 4.2}]).axes
    assert max(4.5, unigram_loss or 0) < axes.get_ylim()[1] < 9.67
    assert [text.get_text() for text in axes.texts] == ["step 0: 9.67"]


def test_each_held_out_task_has_a_colour_and_the_legend_lies_outside_of_the_axes():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    records = [{"step": 10 * step, "train/cross_entropy": 5.0 - step, "eval/a/loss": 4.0 - step,
                "eval/b/loss": 3.0 - step, "eval/c/loss": None} for step in range(3)]
    figure = report._loss(records)
    (axes,) = figure.axes
    assert len({line.get_color() for line in axes.lines}) == len(axes.lines) == 3
    assert axes.get_legend() is None and len(figure.legends) == 1
    figure.draw_without_rendering()
    assert figure.legends[0].get_window_extent().y1 <= axes.get_tightbbox().y0


@pytest.mark.parametrize("name, value, expected", [
    ("train/model_flops_utilization", 0.25, "25%"), ("train/input_wait_fraction", 0.005, "0.5%"),
    ("fraction_tokens_dropped", 1.0, "100%"), ("train/tokens_per_second", 8002.1471, "8,002")])
def test_shares_are_in_per_cent(name, value, expected):
    figure = report._panels([{"step": 1, name: value}], [(name, "title")])
    assert figure.axes[0].yaxis.get_major_formatter()(value, 0) == expected
