"""Command lines that cannot be carried out are refused in one sentence, and write nothing."""

import pathlib

import pytest

from tests.cli.lines import TINY

# The beginning of a command line -> what follows, and what is said.
MISTAKES = {
    "average --output=x": {
        "--run=sparse --last=1": "--last must be an integer of at least 2, not 1.",
        "--run=sparse --last=3": "--last must be at most 2, the number of checkpoints in 'sparse', not 3",
        "--run=empty --last=3": "--run must name a run folder, which holds checkpoints; 'empty' does",
        "--run=sparse --last=2 --output=sparse": "sparse must be new or an empty folder"},
    "cache": {
        "": "Name a TASK, or give the --gin_file",
        "docs_corpu": "No shipped task or mixture is called 'docs_corpu'. Did you mean",
        "docs_corpus_span_corruption --top_k=3": "--top_k goes with --teacher"},
    "cache --gin_file=gin/tasks/text_files.gin --vocabulary=bytes --output=x --gin.TRAIN_FILES='texts.txt'": {
        "--num_processes=0": "--num_processes must be an integer of at least 1, not 0",
        "-- --runner DataflowRunner": "'DataflowRunner' is no flag of Apache Beam",
        "--split test": "'text_files' has the splits train, validation, received 'test'",
        "--output=file/x": "--output 'file/x/text_files/train' cannot be written (Not a directory); name another one.",
        "--gin.TRAIN_FILES='gone.txt'": "TRAIN_FILES: there is no file"},
    "compare": {
        "": "Name what to compare: models and a task",
        "facts t5_tiny": "gin/comparisons/facts.gin makes this choice itself: leave out gin/models/t5_tiny.gin",
        "--gin_file=gin/runs/demo.gin": "These gin files describe no comparison: gin/runs/demo.gin.",
        "--runs a": "at least two run folders", "--runs a b": "'a' is no run folder with a checkpoint"},
    "eval": {
        "--run=nowhere": "--run must name a run folder, which holds operative_config.gin; 'nowhere' does not.",
        "--run=runn": "'runn' does not. Did you mean 'run'?",
        "--run=sparse --step=15": "--step must be best, last, all or a step with a checkpoint (6, 7), not '15'.",
        "--run=sparse --step=-1": "not '-1'", "--run=sparse --step=best": "keeps no best checkpoint; give --step=last",
        "--run=run --examples=0": "--examples must be an integer of at least 1, not 0.",
        "--run=nothing": "describe no run"},
    "export --run=run": {
        "--output=.": "must be new or an empty folder", "--output=": "--output must be a path, not ''",
        "--output=new --step=all": "one checkpoint answers", "--output=new --run=nowhere": "must name a run",
        "--output=new --sampler=beam --num_results=2": "gives the best result; leave out --num_results",
        "--output=new --max_length=0": "--max_length must be an integer of at least 1",
        "--output=new --sampler=sample --top_k=0": "top_k must be an integer of at least 1, not 0"},
    "infer --run=run": {
        "": "Give --input, a file of lines or - for standard input, or --interactive",
        "--input=nowhere.txt": "--input must be a file, or - for standard input; 'nowhere.txt' is none",
        "--input=file --output=file": "--output must be another file than --input",
        "--interactive --input=-": "leave out --input, --output and --score",
        "--interactive --field=question": "leave out --input, --output and --score, and --field"},
    "infer --run=run --input=-": {
        "--target_field=answer": "--target_field goes with --score", "--step=all": "one checkpoint answers",
        "--step=5": "a step with a checkpoint (7)",
        "--output=nowhere/out.jsonl": "--output must be a file in a folder that is there, or -",
        "--output=.": "--output must be a file in a folder that is there",
        "--top_k=4": "--top_k goes with --sampler sample, not greedy",
        "--batch_size=0": "--batch_size must be an integer of at least 1, not 0",
        "--score --sampler=beam": "--score decodes nothing",
        "--sampler=sample --top_p=2": "top_p must be a number in (0, 1], not 2.0",
        "--run=nowhere": "--run must name a run folder",
        "--backend=dtensor": "--backend must be one of 'auto', 'pjrt', not 'dtensor'.",
        "--devices=4": "--devices goes with --backend=pjrt; otherwise one device answers.",
        "--backend=pjrt --gin.MESH_SHAPE='data=16'": "'data=16' is for 16 devices, but there are 8",
        "--gin.MESH_SHAPE='data=8'": "not on 8; leave out the mesh, or add --backend=pjrt."},
    "inspect": {
        "": "Name what to inspect", "switch_tiny --inputs_length=0": "--inputs_length must be an integer of at least 1",
        "switch_bas_8": "There is no preset 'switch_bas_8'. Did you mean 'switch_base_8'?",
        "switch_tiny --gin.SwitchConfig.num_heads=0": "num_heads must be an integer of at least 1, not 0",
        ".": "holds no checkpoint", "no/such/": "There is no folder 'no/such/' here.",
        "--verify": "--verify reads checkpoints", "empty --verify": "holds no checkpoint to verify",
        "switch_base_8 --gin_file=gin/layouts/expert_model.gin --gin.MESH_SHAPE=''":
            "leaves out the mesh axes data and model of the layout's rules",
        "switch_base_8 --gin_file=gin/layouts/expert.gin --gin.MESH_SHAPE='data=16'":
            "The layout cuts num_experts ('expert', 8) over the 16 devices of mesh axis 'data', which must divide it; "
            "make it a multiple of 16, or set MESH_SHAPE to data=8."},
    "serve --run=run": {
        "--port=70000": "--port must be in 0 to 65535, not 70000",
        "--batch_size=0": "--batch_size must be an integer of at least 1, not 0",
        "--host=nowhere.invalid": "--host nowhere.invalid --port 8501 cannot be listened at",
        "--backend=mirrored": "--backend must be one of 'auto', 'pjrt', not 'mirrored'",
        "--max_waiting=0": "--max_waiting", "--max_request_bytes=-1": "--max_request_bytes",
        "--temperature=2": "--temperature goes with --sampler sample", "--step=9": "a step with a checkpoint (7)"},
    "shrink --output=x": {
        "--from=nowhere --num_experts=3": "--from must be a run folder or one of its checkpoints, because the use",
        "--from=weights --num_experts=3": "--from must be a run folder or one of its checkpoints",
        "--from=sparse --num_experts=8": "--num_experts must be below the experts of a layer of --from, 8, not 8.",
        "--from=sparse/checkpoints/step_00000007 --num_experts=0": "--num_experts must be an integer of at least 1",
        "--from=sparse --num_experts=3 --gin.BATCH_SIZ=3": "BATCH_SIZ"},
    "tasks": {
        "glue_sst": "No shipped task or mixture is called 'glue_sst'. Did you mean 'glue_sst2'?",
        "docs_corpus_span_corruption --split=tset": "has the splits train, validation, received 'tset'.",
        "--split=train": "--split and --vocabulary are of the task to show: name it",
        "--gin.SEED=1": "--gin.NAME=VALUE changes what gin files say",
        "glue_sst2 --gin_file=gin/models/switch_tiny.gin": "set no TASK_FEATURE_LENGTHS, the tokens of",
        "docs_corpus_span_corruption --gin.TASK_FEATURE_LENGTHS=8": "TASK_FEATURE_LENGTHS must give the tokens of",
        "docs_corpus_span_corruption --gin.TASK_FEATURE_LENGTHS={'inputs':9,'targets':2}": "use inputs of at"},
    "train": {
        "": "a model (gin/models/switch_tiny.gin), a task (gin/tasks/docs_corpus.gin)",
        "facts": "'facts' names no shipped gin file of models, tasks, runs, layouts.",
        "switch_tiny t5_tiny": "A run has one file of gin/models, not gin/models/switch_tiny.gin and gin/models/t5",
        "demo c4": "gin/runs/demo.gin makes this choice itself: leave out gin/tasks/c4.gin, or give both with"},
    f"train {TINY} --gin.MODEL_DIR='new'": {
        "--gin.SwitchConfig.num_heads=0": "num_heads must be an integer of at least 1, not 0.",
        "--gin.BATCH_SIZE=9": "Use a batch of 8 or 12 sequences, or num_groups_multiple=2.",
        "--gin.MIXTURE_OR_TASK_NAME='docs_corpus_span_coruption'": "docs_corpus_span_corruption",
        "--gin.SwitchConfig.vocab_size=16": "vocab_size 16",
        "--gin.ACTIVATION_DTYPE='float8'": "ACTIVATION_DTYPE must be one of 'auto', 'float32', 'bfloat16'",
        "--gin.INITIAL_CHECKPOINT='nowhere'": "INITIAL_CHECKPOINT must name a run folder",
        "--gin.StepSettings.clip_norm=-1": "clip_norm must be a number above 0",
        "--gin.MODEL_DIR='file/run'": "MODEL_DIR 'file/run' cannot be written",
        "--gin_file=adam.gin --gin.LEARNING_RATE=0.001": "LEARNING_RATE is set, but no part of this run reads it"},
}  # fmt: skip
ADAM = """from __gin__ import dynamic_registration
import keras
from switch_tf.training import trainer
trainer.Trainer.optimizer = @keras.optimizers.AdamW()
"""


@pytest.fixture
def place(refused, run_folder, sparse_run):
    """Runs and files by the names that the command lines have for them."""
    for name, folder in (("run", run_folder), ("sparse", sparse_run),
                         ("weights", sparse_run / "checkpoints" / "step_00000007")):
        pathlib.Path(name).symlink_to(folder)
    for name in ("empty", "nothing/checkpoints/step_00000010"):
        pathlib.Path(name).mkdir(parents=True)
    for name, text in (("file", ""), ("texts.txt", "line of many words\n" * 40), ("adam.gin", ADAM),
                       ("nothing/operative_config.gin", "# nothing\n")):
        pathlib.Path(name).write_text(text)


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("beginning, words, message", [
    (beginning, *row) for beginning, rows in MISTAKES.items() for row in rows.items()])
def test_a_mistake_is_one_sentence_and_writes_nothing(refused, beginning, words, message):
    assert message in refused(f"{beginning} {words}")
