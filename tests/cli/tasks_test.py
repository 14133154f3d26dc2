"""`switch-tf tasks` lists what is registered and shows examples, or says in a sentence why it cannot."""

import pathlib
import subprocess
import sys

import pytest
import seqio
import tensorflow as tf

from switch_tf import data
from switch_tf.cli import main
from switch_tf.configs import shipped_gin
from switch_tf.tasks import preprocessors, vocabularies

MINE = """import seqio
import tensorflow as tf
from switch_tf.tasks import preprocessors, vocabularies

for name in ("first", "second"):
    seqio.TaskRegistry.add(
        f"mine_{name}",
        source=seqio.FileDataSource(
            lambda file: tf.data.TextLineDataset(file).map(lambda line: {"text": line}), {"train": "texts-*.txt"}),
        preprocessors=preprocessors.pretraining(preprocessors.span_corruption),
        output_features=preprocessors.output_features(vocabularies.byte()),
        metric_fns=[],
    )
"""


@pytest.fixture
def tasks(call):
    """A function that lists or shows tasks; returns the JSON object."""
    return lambda *words: call("tasks --json", *words)[0]


@pytest.fixture(scope="module")
def listed():
    arguments = main._parse(["tasks"])
    from switch_tf.cli import tasks
    return {task["name"]: task for task in tasks.run_tasks(arguments)[0]["tasks"]}


def test_every_task_of_a_shipped_gin_file_is_listed_with_it(listed):
    for file in (shipped_gin.folder() / "gin" / "tasks").glob("*.gin"):
        named = next(line for line in file.read_text().splitlines() if line.startswith("MIXTURE"))
        if '"' in named:  # otherwise it is made when it is asked for
            assert listed[named.split('"')[1]]["gin_file"] == f"gin/tasks/{file.name}"
    files = {"trivia_qa": "closed_book_qa",
             "glue_ax": "glue", "wmt14_en_fr": "translation", "xsum": "summarization", "winogrande_m": "winogrande",
             "super_glue_axb": "super_glue", "multi_task_equal": "multi_task", "mc4_span_corruption.zh_Latn": "mc4"}
    assert {name: listed[name]["gin_file"] for name in files} == {
        name: f"gin/tasks/{file}.gin" for name, file in files.items()}


def test_a_task_is_listed_with_all_that_is_known_without_its_data(listed):
    assert listed["glue_cola"] == {
        "name": "glue_cola", "kind": "task", "splits": ["train", "validation", "test"],
        "metrics": ["matthews_corrcoef"], "vocabularies": [vocabularies.t5().sentencepiece_model_file],
        "data_sets": ["glue/cola:2.0.0"], "missing": ["glue/cola:2.0.0"], "tasks": [], "gin_file": "gin/tasks/glue.gin"}
    assert listed["super_glue_multirc"]["metrics"] == ["all_match", "multirc_f1_over_all_answers"]
    assert listed["super_glue_record"]["metrics"] == ["squad"]
    assert listed["docs_corpus_span_corruption"]["missing"] == []
    assert len(listed["mc4_span_corruption"]["tasks"]) == 107


def test_data_are_here_once_their_folder_is(listed, tmp_path, monkeypatch):
    (tmp_path / "glue" / "cola" / "2.0.0").mkdir(parents=True)
    (tmp_path / "glue" / "cola" / "2.0.0" / "dataset_info.json").touch()
    loader = seqio.TaskRegistry.get("glue_cola").source.tfds_dataset
    monkeypatch.setattr(loader, "_data_dir_override", str(tmp_path))
    assert data.describe("glue_cola")["missing"] == []
    assert "glue/cola:2.0.0" not in data.describe("glue")["missing"]
    assert "glue/rte:2.0.0" in data.describe("glue")["missing"]


def test_the_list_is_printed_by_gin_file(call, listed):
    lines = {" ".join(line.split()) for line in call("tasks")[0].splitlines()}
    assert {"gin/tasks/docs_corpus_bytes.gin (ByteVocabulary)",
            "glue_mrpc train validation test not here accuracy f1_score_with_invalid",
            "glue mixture of 11 train validation test 0 of 11 here",
            "mc4_span_corruption mixture of 107 train validation not here"} <= lines
    assert not [line for line in lines if line.startswith("mc4_span_corruption.")]


def test_examples_are_text_with_named_sentinels_and_ids(tasks):
    found = tasks("docs_corpus_span_corruption_bytes", "--split=validation")
    assert (found["split"], found["vocabulary_size"], found["lengths"]) == (
        "validation", 359, {"inputs": 512, "targets": 114})
    assert len(found["examples"]) == 3
    for example in found["examples"]:
        assert example["targets"]["ids"][0] == 358 and example["targets"]["text"].startswith("<extra_id_0>")
        assert 358 in example["inputs"]["ids"] and "<extra_id_0>" in example["inputs"]["text"]
        assert example["targets"]["ids"][-1] == 1 and example["targets"]["text"].endswith(" </s>")


def test_another_vocabulary_makes_other_ids(tasks):
    found = tasks("docs_corpus_library", "--vocabulary=bytes")
    assert found["vocabulary_size"] == 359
    assert bytes(id_ - 3 for id_ in found["examples"][0]["inputs"]["ids"][:9]) == b"library: "


def test_the_files_that_a_task_is_made_from_can_be_given(tasks, tmp_path):
    (tmp_path / "pairs.jsonl").write_text('{"inputs": "a b", "targets": "c"}\n' * 40)
    found = tasks("text_to_text_files", "--gin_file=gin/tasks/text_to_text_files.gin", "--vocabulary=bytes",
                f"--gin.TRAIN_FILES='{tmp_path}/pairs.jsonl'")
    assert found["examples"][0]["targets"] == {"text": "c </s>", "ids": [102, 1]}


def test_ids_are_spelt_out_sentinel_by_sentinel():
    if "by_hand" not in seqio.TaskRegistry.names():
        tokens = {"inputs": [100, 358, 357, 101, 1], "targets": [358, 102, 1]}
        seqio.TaskRegistry.add(
            "by_hand",
            source=seqio.FunctionDataSource(lambda split, shuffle_files, seed=None: tf.data.Dataset.from_tensors(
                {name: tf.constant(ids) for name, ids in tokens.items()}), splits=["train"]),
            preprocessors=[],
            output_features=preprocessors.output_features(vocabularies.byte()),
        )  # fmt: skip
    (example,) = data.examples(data.DatasetDescription("by_hand", {"inputs": 8, "targets": 8}, 1), 3)
    # byte 97 is "a", and so its id, after padding, end and unknown, is 100
    assert example == {
        "inputs": {"text": "a<extra_id_0><extra_id_1>b </s>", "ids": [100, 358, 357, 101, 1]},
        "targets": {"text": "<extra_id_0>c </s>", "ids": [358, 102, 1]}}


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A folder with a user's module, its gin file and its data."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    pathlib.Path("my_texts.py").write_text(MINE)
    pathlib.Path("mine.gin").write_text(
        'from __gin__ import dynamic_registration\nimport my_texts\nMIXTURE_OR_TASK_NAME = "mine_first"\n'
        'TASK_FEATURE_LENGTHS = {"inputs": 32, "targets": 12}\n')
    yield
    for name in ("mine_first", "mine_second"):
        if name in seqio.TaskRegistry.names():
            seqio.TaskRegistry.remove(name)
    sys.modules.pop("my_texts", None)


def test_tasks_of_ones_own_module_are_listed_and_shown(tasks, mine):
    found = {task["name"]: task for task in tasks("--gin_file=mine.gin")["tasks"]}
    assert (found["mine_first"]["gin_file"], found["mine_first"]["missing"]) == ("mine.gin", ["texts-*.txt"])
    assert found["mine_second"]["gin_file"] is None  # its name is not written out
    pathlib.Path("texts-1.txt").write_text("A line of text, of which there is not more than this.\n" * 3)
    assert tasks("mine_second", "--gin_file=mine.gin")["examples"]
    shorter = tasks("mine_second", "--gin_file=mine.gin",
                  "--gin.TASK_FEATURE_LENGTHS={'inputs': 24, 'targets': 12}")
    assert shorter["lengths"]["inputs"] == 24 and len(shorter["examples"][0]["inputs"]["ids"]) <= 24


def test_a_task_that_is_made_when_it_is_asked_for_is_made(tasks, refused, mine):
    pathlib.Path("my_texts.py").write_text(
        f"{MINE}\n\ndef make(file):\n    tasks = seqio.TaskRegistry\n    if file == 'no':\n"
        "        raise ValueError('No such file.')\n"
        "    tasks.add_provider('mine_third', tasks.get('mine_first').replace(name='mine_third'))\n"
        "    return 'mine_third'\n")
    pathlib.Path("made.gin").write_text(
        "from __gin__ import dynamic_registration\nimport my_texts\nFILE = %gin.REQUIRED\nmy_texts.make.file = %FILE\n"
        'MIXTURE_OR_TASK_NAME = @my_texts.make()\nTASK_FEATURE_LENGTHS = {"inputs": 32, "targets": 12}\n')
    for binding, sentence in (("", "FILE has no value; set it"), ("--gin.FILE='no'", "No such file.")):
        assert refused(f"tasks --gin_file=made.gin {binding}").startswith(f"switch-tf tasks: {sentence}")
    names = {task["name"] for task in tasks("--gin_file=made.gin", "--gin.FILE='yes'")["tasks"]}
    assert "mine_third" in names
    seqio.TaskRegistry.remove("mine_third")


def test_a_vocabulary_out_of_reach_is_named(refused, monkeypatch):
    def unreachable(self):
        raise tf.errors.FailedPreconditionError(None, None, "Could not resolve host")

    monkeypatch.setattr(type(vocabularies.t5()), "vocab_size", property(unreachable))
    assert "gs://t5-data/vocabs/cc_all.32000/sentencepiece.model, cannot be read" in refused("tasks glue_sst2")


def test_data_that_are_not_prepared_are_named(refused, monkeypatch, tmp_path):
    monkeypatch.setattr(data, "vocabulary_size", lambda name, vocabulary: 32100)
    loader = seqio.TaskRegistry.get("squad").source.tfds_dataset
    monkeypatch.setattr(loader, "_data_dir_override", str(tmp_path))
    assert "The TFDS data set squad/v1.1:3.0.0 is not prepared" in refused("tasks squad")


def test_whoever_stops_reading_the_list_sees_no_traceback():
    command = f"{sys.executable} -m switch_tf.cli inspect --list | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert done.stdout.count("\n") == 1 and done.stderr == ""
