import json

import numpy as np

from switch_tf.checkpoints import run_config
from switch_tf.reporting import report
from tests.checkpoints.run_config_test import CONFIG


def _write_metrics(folder, with_experts=True):
    lines = [{"step": 0, "eval/task/loss": 8.0, "eval/task/unigram_loss": 6.0}]
    for step in (10, 20):
        line = {"step": step, "train/loss": 9.0 - step / 10, "train/cross_entropy": 8.9 - step / 10,
                "train/learning_rate": 0.01, "train/gradient_norm": 1.0,
                "train/tokens_per_second": 100.0 * step, "train/model_flops_utilization": 0.5,
                "train/input_wait_fraction": 0.1}
        if with_experts:
            for layer in ("encoder/layers_11", "encoder/layers_3", "decoder/layers_1"):
                line[f"router/{layer}/expert_load"] = [0.25, 0.75]
                for name in ("fraction_tokens_dropped", "router_entropy", "load_balancing_loss"):
                    line[f"router/{layer}/{name}"] = 0.5
        lines.append(line)
    lines += [{"step": 10, "eval/task/loss": 3.5, "eval/task/accuracy": 0.25},
              {"step": 20, "eval/task/loss": 4.0, "eval/task/accuracy": 0.5}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_the_summary_compares_the_first_the_last_and_the_best_evaluation(tmp_path):
    _write_metrics(tmp_path)
    summary = report.summarize(tmp_path)
    assert summary["eval/task/loss"] == {"first": 8.0, "last": 4.0, "best": 3.5, "first_step": 0, "last_step": 20,
                                         "best_step": 10}
    assert summary["eval/task/accuracy"]["best"] == 0.5
    assert summary["eval/task/unigram_loss"] == 6.0
    assert summary["train/tokens_per_second"] == 1500.0  # median of 1000 and 2000
    assert summary["step"] == 20


def test_pictures_are_written_for_sparse_and_dense_runs(tmp_path):
    for name, with_experts in (("sparse", True), ("dense", False)):
        folder = tmp_path / name
        folder.mkdir()
        _write_metrics(folder, with_experts)
        report.write(folder)
        assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
        page = (folder / "report.html").read_text()
        assert page.count("<img") == (4 if with_experts else 3)
        assert "8.0000 at step 0, 4.0000 at step 20, best 3.5000 at step 10" in page
        assert "Configuration" not in page


def test_the_page_holds_the_configuration_as_text(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "draw", lambda records: {"Loss": b""})
    _write_metrics(tmp_path)
    (tmp_path / "operative_config.gin").write_text("# switch-tf train <here>\nSEED = 1\n")
    report.write(tmp_path)
    assert "# switch-tf train &lt;here&gt;\nSEED = 1\n" in (tmp_path / "report.html").read_text()


def test_the_page_begins_with_the_work_and_its_results(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "draw", lambda records: {"Loss": b""})
    lines = [{"step": 0, "eval/task/loss": 9.0}]
    lines += [{"step": step, "train/loss": 5.0, "train/tokens_per_second": 60_000.0, "train/seconds_per_step": 0.5,
               "seconds/steps": 100.0, "router/encoder/layers_1/expert_load": [0.0, 1.0],
               "router/encoder/layers_3/expert_load": [0.5, 0.5]} for step in (20, 50)]
    lines.append({"step": 50, "eval/task/accuracy": 0.25, "eval/task/loss": 4.0})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    work = ("50 steps, about 1.5 million tokens in 3 minutes. Held out: accuracy 25.0%, loss 4.0000. 1 of 4 experts "
            "have no token.")
    report.write(tmp_path)
    assert f"<b>2 experts in each of 2 layers: {work}</b>" in (tmp_path / "report.html").read_text()
    run_config.write(tmp_path, CONFIG)
    report.write(tmp_path)
    assert f"<b>{CONFIG.model.num_parameters / 1e6:.1f} million parameters, 2 experts in" in (
        tmp_path / "report.html").read_text()
    (tmp_path / "config.json").write_text("{")
    report.write(tmp_path)
    assert f"<b>2 experts in each of 2 layers: {work}</b>" in (tmp_path / "report.html").read_text()


def test_a_run_that_logged_nothing_gets_no_report(tmp_path):
    report.write(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_line_that_is_no_record_costs_that_line_and_a_word(tmp_path, capsys):
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(b'{"step": 1, "train/loss": 2.0}\n[]\n\xff\n{"step": 2}\n{"step": 3, "tra')
    assert report.read_metrics(tmp_path) == [{"step": 1, "train/loss": 2.0}, {"step": 2}]
    assert "metrics.jsonl: skipped 3 unreadable lines (line 2, 3, 5)." in capsys.readouterr().err


def test_odd_names_and_numbers_of_experts_cost_no_picture(tmp_path):
    load = "router/encoder/layers_1/expert_load"
    lines = [{"step": 1, load: [0.5, 0.5], "train/cross_entropy": 1e304}, {"step": 2, load: [1.0]},
             {"step": 3, load: None}, {"step": 4, load: [0.2, 0.8], "router/odd/expert_load": [1.0], "other": ["a"]},
             {"step": 5, "router/encoder/layers_2/expert_load": None}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    records = report.read_metrics(tmp_path)
    assert report.sparse_layers(records[3]) == ["encoder/layers_1"]
    steps, shares = report._loads(records, "encoder/layers_1")
    assert steps == [1, 4] and np.allclose(shares, [[0.5, 0.2], [0.5, 0.8]])
    report.write(tmp_path)
    assert (tmp_path / "report.html").is_file()


def test_the_time_of_all_processes_is_summed_by_cause(tmp_path):
    lines = [{"step": 0, "seconds/start/import": 5.0, "seconds/compile": 20.0}, {"step": 5, "seconds/steps": 60.0},
             {"step": 5, "seconds/start/import": 4.0, "seconds/start/data": 1.0, "seconds/redone": 10.0},
             {"step": 9, "seconds/steps": 1e300, "seconds/save": -2.0}, {"step": 10, "seconds/save": None}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    records = report.read_metrics(tmp_path)
    assert report.time_by_cause(records[:3]) == {"steps": 60.0, "compile": 20.0, "start": 10.0, "redone": 10.0}
    text = "100 s: steps 60.0%, compile 20.0%, start 10.0%, redone 10.0%"
    assert f"\ntime: {text}\n" in report.describe_summary(report.summarize(tmp_path, records[:3]))
    (axes,) = report._bars(report.time_by_cause(records[:3])).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == text.split(": ")[1].split(", ")
    report.write(tmp_path)  # numbers that no run has cost no picture
    assert (tmp_path / "report.html").read_text().count("<img") == 4


def test_the_best_is_the_lowest_where_the_metric_says_so(tmp_path):
    lines = [{"step": step, "eval/t/error_share": value, "eval/t/min_edit": value, "eval/t/f1": value,
              "lower_is_better": {"eval/t/error_share": True}}
             for step, value in ((0, 3.0), (1, 1.0), (2, None), (3, 2.0))]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    summary = report.summarize(tmp_path)
    assert [summary[f"eval/t/{name}"]["best"] for name in ("error_share", "min_edit", "f1")] == [1.0, 1.0, 3.0]


def test_of_a_long_run_arrays_are_thinned_and_nothing_else(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "_MOST_ARRAYS", 4)
    (tmp_path / "metrics.jsonl").write_text("".join(
        json.dumps({"step": step, "train/loss": 1.0, "router/x/expert_load": [step, None]}) + "\n"
        for step in range(11)))
    records = report.read_metrics(tmp_path)
    assert [record["step"] for record in records] == [*range(11)] and all("train/loss" in one for one in records)
    steps, loads = report.series(records, "router/x/expert_load")
    assert steps == [0, 4, 8]  # each second one was dropped at the fifth, the fourth of what was left at the ninth
    assert [load[0] for load in loads] == steps and all(np.isnan(load[1]) for load in loads)


def test_tokens_are_whole_numbers_and_losses_have_four_digits(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "draw", lambda records: {"Loss": b""})
    line = {"step": 1, "train/loss": 2.00006, "train/tokens_per_second": 8002.1471}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    report.write(tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert "<td>8,002</td>" in page and "<td>2.0001</td>" in page


def test_names_that_a_terminal_would_obey_or_a_picture_would_typeset_are_plain_text(tmp_path, recwarn):
    """An unknown run's metrics.jsonl is data: `$^$` is no formula, and an escape sequence colours nothing."""
    lines = [{"step": step, "train/cross_entropy": 1.0, "eval/$^$/loss": 2.0, "eval/\x1b[31mred\u202e/loss": 3.0}
             for step in (0, 1)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    report.write(tmp_path)
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    text = report.describe_summary(report.summarize(tmp_path))
    assert "eval/\\x1b[31mred\\u202e/loss: 3.0000" in text
    assert "\x1b" not in text + (tmp_path / "report.html").read_text()
    assert not [str(warning.message) for warning in recwarn if "Glyph" in str(warning.message)]
