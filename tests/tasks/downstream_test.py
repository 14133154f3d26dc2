"""Tasks to fine-tune on read tiny data that their real TFDS builders write, and score right and wrong predictions.

The cases, written by hand, are in downstream_cases.py.
"""

import importlib.util
import pathlib
import re
from unittest import mock

import pytest
import seqio
import tensorflow_datasets as tfds

from switch_tf import data, tasks
from switch_tf.tasks import (
    closed_book_qa,
    glue,
    multi_task,
    prepared_tfds,
    preprocessors,
    super_glue,
    text_to_text,
    vocabularies,
)

_SPEC = importlib.util.spec_from_file_location("cases", pathlib.Path(__file__).with_name("downstream_cases.py"))
cases = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(cases)
CASES = cases.CASES
MODULES = ("anli", "arc", "closed_book_qa", "glue", "squad", "summarization", "super_glue", "translation", "winogrande")
LENGTHS = {"inputs": 128, "targets": 32}
for module in MODULES:
    importlib.import_module(f"switch_tf.tasks.{module}")


def prepare(name, examples_by_split, data_dir):
    """Writes a data set as its builder would, without the downloads."""
    builder = tfds.builder(name, data_dir=str(data_dir))
    examples = {split: list(enumerate(examples)) for split, examples in examples_by_split.items()}
    skip = tfds.download.ComputeStatsMode.SKIP
    config = tfds.download.DownloadConfig(compute_stats=skip, try_download_gcs=False)
    with mock.patch.object(type(builder), "_split_generators", lambda *args, **kwargs: examples):
        builder.download_and_prepare(download_config=config)


def whole(split):
    return split.partition("[")[0]


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    """A folder with the data sets of all tasks, each with its case's records in every split."""
    tfds.disable_progress_bar()
    folder = tmp_path_factory.mktemp("tfds")
    prepared = {}
    for name, case in CASES.items():
        source = seqio.TaskRegistry.get(name).source
        splits = {whole(split): case.records for split in source._split_names.values()}
        prepared[source.tfds_dataset.name] = prepared.get(source.tfds_dataset.name, {}) | splits
    for name, examples_by_split in prepared.items():
        prepare(name, examples_by_split, folder)
    return str(folder)


@pytest.fixture(scope="module")
def with_bytes(data_dir):
    """A function from the name of a task to a copy that reads the tiny data, and needs no vocabulary from elsewhere."""

    def copy(name, vocabulary=None):
        task = seqio.TaskRegistry.get(name)
        splits = {split: re.sub(r"\d+", "50%", part) for split, part in task.source._split_names.items()}
        source = prepared_tfds.PreparedTfdsSource(task.source.tfds_dataset.name, splits)
        source.tfds_dataset.override_data_dir(data_dir)
        features = preprocessors.output_features(vocabulary or vocabularies.byte())
        return task.replace(name=f"{name}_tiny", source=source, output_features=features)

    return copy


def read(task, split):
    dataset = task.get_dataset(LENGTHS, split=split, shuffle=False, seed=0, try_in_mem_cache=False)
    return list(dataset.as_numpy_iterator())


@pytest.fixture(scope="module")
def examples_of(with_bytes):
    """A function from the name of a task to its examples by their targets: those of a split that has all records."""
    known = {}

    def examples(name):
        if name not in known:
            task = with_bytes(name)
            split = next(split for split, part in task.source._split_names.items() if "[" not in part)
            examples = read(task, split)
            known[name] = {example["targets_pretokenized"].decode(): example for example in examples}
            assert len(known[name]) == len(examples)
        return known[name]

    return examples


def test_every_declared_task_has_a_case():
    declared = {name for module in MODULES for name in tasks.TASKS[module]}
    assert declared & set(seqio.TaskRegistry.names()) == set(CASES)


def test_the_documents_name_every_task_and_mixture():
    text = (pathlib.Path(__file__).parents[2] / "docs" / "tasks.md").read_text()
    declared = {name for module in (*MODULES, "multi_task") for name in tasks.TASKS[module]}
    mixtures = declared & set(seqio.MixtureRegistry.names())
    assert [name for name in (*CASES, *mixtures) if f"`{name}`" not in text] == []


@pytest.mark.parametrize("name", CASES)
def test_the_features_of_an_example_are_as_written_by_hand(name, examples_of):
    case, examples = CASES[name], examples_of(name)
    assert set(examples) == set(case.targets)
    decode = vocabularies.byte().decode
    example = examples[case.targets[0]]
    assert (decode(example["inputs"]), decode(example["targets"])) == (case.inputs, case.targets[0])
    assert example["inputs"][-1] == example["targets"][-1] == 1  # the end of sequence


def score(task, examples, predictions):
    """What seqio's evaluator gives to the metrics, and what they say."""
    texts = [example["targets_pretokenized"].decode() for example in examples]
    postprocess = task.postprocess_fn
    targets = [postprocess(text, example=example, is_target=True)
               for text, example in zip(texts, examples, strict=True)]
    predicted = [postprocess(text, example=example, is_target=False)
                 for text, example in zip(predictions, examples, strict=True)]
    found = {}
    for metric in task.metric_fns:
        found |= metric(targets, predicted)
    return found


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.scores])
def test_right_predictions_score_100_and_wrong_ones_what_they_should(name, examples_of):
    task, case = seqio.TaskRegistry.get(name), CASES[name]
    examples = [examples_of(name)[target] for target in case.targets]
    assert score(task, examples, case.right) == pytest.approx(dict.fromkeys(case.scores, 100.0))
    assert score(task, examples, case.wrong) == pytest.approx(case.scores, abs=1e-9)


def test_what_is_no_label_is_a_wrong_answer(examples_of):
    for name in ("glue_sst2", "glue_mrpc", "super_glue_multirc", "winogrande_xl", "anli_r3", "arc_easy"):
        examples = list(examples_of(name).values())
        scores = score(seqio.TaskRegistry.get(name), examples, ["no such label"] * len(examples))
        assert set(scores.values()) == {0.0}, name


def test_tasks_without_metrics_are_those_that_cannot_be_scored():
    unscored = {name for name in CASES if not seqio.TaskRegistry.get(name).metric_fns}
    assert unscored == {"glue_ax", "super_glue_wsc_simple_train"}
    assert unscored == {name for name, case in CASES.items() if not case.scores}


def test_questions_to_train_on_are_not_validated_on(with_bytes):
    for name, size in closed_book_qa.SIZES.items():
        splits = seqio.TaskRegistry.get(name).source._split_names
        assert (splits["train"], splits["validation"]) == (f"train[:{size}]", f"train[{size}:]")
        task = with_bytes(name)
        inputs = [[example["inputs_pretokenized"] for example in read(task, split)]
                  for split in ("train", "validation")]
        assert len(inputs[0]) == len(inputs[1]) == 1 and inputs[0] != inputs[1]


def test_text_that_looks_like_a_sentinel_is_spelt_out(with_bytes, tmp_path):
    record = {"document": "See <extra_id_0> there.", "summary": "<extra_id_1>"}
    prepare("xsum:1.1.0", dict.fromkeys(("train", "validation", "test"), [record]), tmp_path)
    task = with_bytes("xsum", vocabularies.docs_corpus())
    task.source.tfds_dataset.override_data_dir(str(tmp_path))
    (example,) = read(task, "train")
    assert max(*example["inputs"], *example["targets"]) < vocabularies.docs_corpus().vocab_size - 100
    assert vocabularies.docs_corpus().decode(example["inputs"].tolist()) == "summarize: See <extra_id_0> there."


def rates(name):
    mixture = seqio.MixtureRegistry.get(name)
    return {task.name: mixture.get_rate(task) for task in mixture.tasks}


def test_benchmarks_are_mixed_by_numbers_of_examples():
    found = rates("glue")
    assert (found["glue_cola"], found["glue_qqp"], len(found)) == (8551, 363849, 11)
    assert "glue_wnli" not in found
    found = rates("super_glue")
    assert (found["super_glue_record"], found["super_glue_wsc_simple_train"], len(found)) == (138854, 259, 12)
    assert found["definite_pronoun_resolution"] == 1322


@pytest.mark.parametrize("name", ["glue_mnli_matched", "glue_ax"])
def test_what_has_no_training_split_is_still_evaluated(name):
    assert rates("glue")[name] > 0  # and never drawn to train, for want of a split
    assert "train" not in seqio.TaskRegistry.get(name).source._split_names


@pytest.mark.parametrize("name", [
    "glue", "glue_equal", "glue_temperature", "glue_mnli_and_dev", "multi_task_proportional", "multi_task_temperature",
    "multi_task_equal"])
def test_evaluation_sets_share_the_weight_of_the_task_that_they_belong_to(name):
    mixture = seqio.MixtureRegistry.get(name)
    rate = {task: mixture.get_rate(seqio.TaskRegistry.get(task)) for task in (
        "glue_mnli", "glue_mnli_matched", "glue_mnli_mismatched")}
    assert rate["glue_mnli_matched"] == rate["glue_mnli_mismatched"] == rate["glue_mnli"] / 2


@pytest.mark.parametrize("name", ["super_glue", "super_glue_equal", "super_glue_temperature", "multi_task_proportional",
                                  "multi_task_temperature", "multi_task_equal"])
def test_the_winograd_schemas_have_the_weight_of_those_that_are_trained_on(name):
    mixture = seqio.MixtureRegistry.get(name)
    trained, evaluated = (mixture.get_rate(seqio.TaskRegistry.get(f"super_glue_wsc_simple_{kind}"))
                          for kind in ("train", "eval"))
    assert trained == evaluated > 0


def test_the_average_of_glue_counts_mnli_once():
    values = {"glue_cola": [60.0], "glue_mrpc": [90.0, 86.0], "glue_mnli_matched": [85.0],
              "glue_mnli_mismatched": [87.0]}
    scores = {name: data.TaskScores(dict(zip(("accuracy", "f1"), found, strict=False)), [])
              for name, found in values.items()}
    assert data.average(scores) == pytest.approx((60 + 88 + 86) / 3)


def test_a_temperature_raises_small_tasks_and_equal_mixtures_know_no_sizes():
    assert rates("glue_temperature")["glue_mrpc"] == pytest.approx(3668**0.5)
    assert set(rates("glue_equal").values()) == set(rates("multi_task_equal").values()) == {1, 0.5}  # half: MNLI's sets
    assert set(rates("super_glue_equal").values()) == {1}
    assert len(rates("multi_task_equal")) == 11 + 12 + 6  # C4, CNN/DailyMail, SQuAD and three translations


def test_large_tasks_count_as_the_limit_and_sizes_that_are_not_given_come_from_the_data(data_dir):
    sizes = {"squad": None, "glue_qqp": glue.SIZES["glue_qqp"], "glue_cola": glue.SIZES["glue_cola"]}
    if "limited" not in seqio.MixtureRegistry.names():
        text_to_text.add_mixture("limited", sizes, limit=10000)
    loader = seqio.TaskRegistry.get("squad").source.tfds_dataset
    loader.override_data_dir(data_dir)
    try:
        assert rates("limited") == {"squad": 2, "glue_qqp": 10000, "glue_cola": 8551}
    finally:
        loader.override_data_dir(None)


def test_the_limit_counts_before_the_temperature():
    """100 of 400 examples, and the root of that; the root of all 400, limited to 100, would be 20."""
    if "limited_and_tempered" not in seqio.MixtureRegistry.names():
        text_to_text.add_mixture("limited_and_tempered", {"glue_qqp": 400, "glue_cola": 25}, 100, 2.0)
    assert rates("limited_and_tempered") == {"glue_qqp": 10, "glue_cola": 5}


def test_rte_counts_once_in_the_mixture_of_both_benchmarks():
    halves = multi_task.SIZES["glue_rte"], multi_task.SIZES["super_glue_rte"]
    assert halves == (1245, 1245) and super_glue.SIZES["super_glue_rte"] == 2490


@pytest.fixture(scope="module")
def mixture(with_bytes):
    """The name of a mixture of tasks whose examples hold more than inputs and targets, each of another kind."""
    names = ("super_glue_multirc", "super_glue_record", "squad", "definite_pronoun_resolution")
    tasks = [with_bytes(name) for name in names]
    for task in tasks:
        seqio.TaskRegistry.add_provider(task.name, task.replace(name=task.name, shuffle_buffer_size=16))
    text_to_text.add_mixture("tiny_mixture", {task.name: 10.0 for task in tasks})
    yield "tiny_mixture"
    seqio.MixtureRegistry.remove("tiny_mixture")
    for task in tasks:
        seqio.TaskRegistry.remove(task.name)


@pytest.mark.slow  # tracing seqio's packing
def test_a_mixture_is_made_into_packed_batches_of_what_a_model_reads(mixture):
    description = data.DatasetDescription(mixture, {"inputs": 256, "targets": 64}, 4, pack=True)
    data.check_examples(description)
    batch = next(iter(data.get_dataset(description)))
    assert {name: tuple(tokens.shape) for name, tokens in batch.items()} == {
        **dict.fromkeys(("encoder_input_tokens", "encoder_segment_ids", "encoder_positions"), (4, 256)),
        **{f"decoder_{name}": (4, 64) for name in ("target_tokens", "input_tokens", "loss_weights", "segment_ids",
                                                   "positions")}}  # fmt: skip
    assert batch["encoder_segment_ids"].numpy().max() > 1  # several examples in a sequence


def test_every_task_of_a_mixture_is_evaluated_to_its_end(mixture):
    description = data.DatasetDescription(mixture, {"inputs": 128, "targets": 64}, 4, split="validation")
    targets = [row for batch in data.get_dataset(description).as_numpy_iterator()
               for row in batch["decoder_target_tokens"].tolist() if any(row)]
    # two answers of multirc, three of record, two of SQuAD; definite pronouns have no such split
    assert len(targets) == 7
