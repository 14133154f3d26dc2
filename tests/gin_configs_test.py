"""Every shipped gin file is read, with what it requires, and every combination of a run's four choices builds."""

import dataclasses
import itertools
import re

import pytest

from switch_tf import Experiment, SwitchConfig, experiments
from switch_tf.configs import shipped_gin

FILES = {kind: sorted(path.stem for path in (shipped_gin.folder() / "gin" / kind).glob("*.gin"))
         for kind in ("models", "layouts", "runs", "tasks")}
# Runs that go with any model, layout and task.
RUNS = [name for name in FILES["runs"] if not name.endswith("demo") and name != "own_text"]
BIND = ["MODEL_DIR='unused'"]


def _parse(model, layout, run, task, bindings=()):
    extra = ["INITIAL_CHECKPOINT='unused'"] if run.startswith("finetune") else []
    extra += ["TEACHER='unused'"] if run.endswith("distill") else []
    extra += ["TRAIN_FILES='unused'"] if task.endswith("text_files") else []
    names = {"models": model, "layouts": layout, "tasks": task, "runs": run}
    files = [f"gin/{kind}/{name}.gin" for kind, name in names.items() if name]
    return Experiment.from_gin(files, [*BIND, *extra, *bindings])


# Every pair of two files: they know nothing of each other.
@pytest.mark.parametrize(("layout", "run", "task"), [
    (layout, RUNS[(i + j) % len(RUNS)], task)
    for (i, layout), (j, task) in itertools.product(enumerate(FILES["layouts"]), enumerate(FILES["tasks"]))])
def test_every_layout_run_and_task_configures_a_run(layout, run, task):
    configured = _parse("switch_tiny", layout, run, task).run
    assert configured.mixture_or_task_name
    assert set(configured.task_feature_lengths) == {"inputs", "targets"}


@pytest.mark.parametrize("model", FILES["models"])
def test_every_model_goes_with_a_run(model):
    assert _parse(model, "single", "pretrain", "docs_corpus").config == SwitchConfig.from_preset(model)


def test_a_runs_model_has_the_configuration_of_the_model_file():
    described = _parse("switch_tiny", "single", "pretrain", "docs_corpus")
    placed = experiments.place_on_devices(described, 1, "CPU")
    assert placed.make_model().config == SwitchConfig.from_preset("switch_tiny")


def test_a_run_without_a_layout_file_uses_one_device():
    from switch_tf.partitioning import Layout
    assert _parse("switch_tiny", None, "pretrain", "docs_corpus").layout == Layout()


def test_finetuning_overrides_the_dropouts_of_the_model_file():
    config = _parse("switch_base_8", "single", "finetune", "docs_corpus").config
    assert (config.dropout_rate, config.expert_dropout_rate) == (0.1, 0.4)
    pretrained = dataclasses.replace(config, dropout_rate=0.0, expert_dropout_rate=0.0)
    assert pretrained == SwitchConfig.from_preset("switch_base_8")


def test_the_papers_batch_is_2_to_the_20_tokens_and_the_default_a_sixteenth_of_it():
    for run, steps in (("pretrain", 550_000), ("finetune", 16_000)):
        sizes = []
        for name in (run, f"{run}_paper"):
            configured = _parse("switch_base_8", "single", name, "c4").run
            assert configured.train_steps == steps
            sizes.append(configured.batch_size * configured.task_feature_lengths["inputs"])
        assert sizes == [2**16, 2**20]


def test_gshards_second_choice_is_kept_with_twice_its_gate():
    """Algorithm 1 of arXiv 2006.16668: with probability min(1, 2 g2)."""
    config = SwitchConfig.from_preset("gshard_600b")
    assert (config.second_expert_policy, 1 / config.second_expert_threshold) == ("random", 2)


def test_the_demo_is_a_whole_run():
    demo = Experiment.from_gin(["gin/runs/demo.gin"])
    assert demo.run.model_dir == "runs/demo" and demo.run.unigram_batches > 0
    schedule = demo.optimizer.arguments["learning_rate"]
    assert schedule.name.endswith(".Cooldown") and float(schedule.make()(demo.run.train_steps)) == 0.0


def test_own_text_is_a_whole_run_whose_vocabulary_fits_its_model():
    own = Experiment.from_gin(["gin/runs/own_text.gin"], ["TRAIN_FILES=texts.txt"])
    assert (own.run.model_dir, own.run.vocabulary, own.config.vocab_size) == ("runs/own_text", "docs_corpus", 4096)


@pytest.mark.parametrize("binding", ["LEARNING_RATE=0.25", "Adafactor.learning_rate=0.25"])
def test_the_learning_rate_is_a_macro_and_a_parameter(binding):
    assert float(Experiment.from_gin(["gin/runs/demo.gin"], [binding]).make_optimizer().learning_rate) == 0.25


def test_each_macro_has_its_default_in_one_kind_of_file():
    owners = {"NUM_EXPERTS": "models", "DROPOUT_RATE": "models", "EXPERT_DROPOUT_RATE": "models",
              "MESH_SHAPE": "layouts"} | dict.fromkeys((
                  "MIXTURE_OR_TASK_NAME", "TASK_FEATURE_LENGTHS", "TRAIN_FILES", "VALIDATION_FILES", "TEXT_FIELD",
                  "INPUT_FIELD", "TARGET_FIELD", "PREFIX", "METRICS"), "tasks")
    for kind, names in FILES.items():
        for name in names:
            if name in ("finetune", "demo", "own_text"):  # on purpose
                continue
            text = (shipped_gin.folder() / "gin" / kind / f"{name}.gin").read_text()
            for line in text.splitlines():
                macro = line.partition(" = ")[0]
                if macro.isupper() and " = " in line:
                    assert owners.get(macro, "runs") == kind, (name, macro)


@pytest.mark.parametrize("path", sorted(shipped_gin.folder().glob("gin/*/*.gin")), ids=lambda path: path.stem)
def test_every_file_says_what_it_is_and_what_it_needs(path):
    before = re.split("^from __gin__|^include ", path.read_text(), flags=re.MULTILINE)[0]
    header = [line for line in before.splitlines() if line]
    assert all(line.startswith("# ") for line in header)
    assert all(any(word in line for line in header) for word in ("Provides:", "Requires:", "Often overridden:"))


@pytest.mark.parametrize("name", sorted(
    {shipped_gin.stem(file) for file in shipped_gin.names("comparisons")} - {"tiny_facts", "models"}))
def test_every_comparison_is_one_of_runs_that_do_the_same_work(name):
    from switch_tf.cli import main, runs
    comparison, _ = runs.read_comparison(main._parse(["compare", f"--gin_file=gin/comparisons/{name}.gin"]))
    assert len(comparison.variants) >= 2 and comparison.model_dir.startswith("runs/")
    assert len(comparison.seeds) == (1 if name == "demo" else 3)
