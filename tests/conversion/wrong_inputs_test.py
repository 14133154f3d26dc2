"""Wrong checkpoints of every format, through both doors: `convert` and INITIAL_CHECKPOINT answer in one sentence.

Each case damages a checkpoint in a folder of its own and gives a part of the message, its way out included. No case
reads as a success, leaves an output behind, or runs what a pickle asks for.
"""

import dataclasses
import functools
import os
import pathlib
import pickle
import re
import shutil
import struct
import zipfile

import numpy as np
import pytest

from switch_tf import SwitchConfig, conversion
from switch_tf.cli import main
from switch_tf.conversion import model_gin
from tests.conversion import mesh_tensorflow_checkpoints, t5x_checkpoints
from tests.conversion.shared import BLOCKS, GOLDEN, copy, golden, tensors_of
from tests.conversion.t5x_orbax_test import write_orbax

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22ead\nsize 12345\n"
TRAIN = ["train", "--gin_file=gin/tasks/docs_corpus_bytes.gin", "--gin_file=gin/runs/finetune.gin",
         "--gin.VOCABULARY='bytes'", "--gin.MODEL_DIR='run'", "--gin.INITIAL_CHECKPOINT='there'",
         "--gin.BATCH_SIZE=4", "--gin.TASK_FEATURE_LENGTHS={'inputs': 24, 'targets': 12}"]
BYTES = 384  # ids that the task needs
EXPERTS = "encoder/layers_1/mlp/expert/wi/kernel"
KERNEL = "target.encoder.layers_0.mlp.wi.kernel"
GIN_FILE = "give the --gin_file of its model, or download it again if it is incomplete."
AGAIN = "; download it again."
NO_FORMAT = ("of these.",)


class Code:
    """An object whose pickle makes the folder `harm`."""

    def __reduce__(self):
        return os.mkdir, ("harm",)


def model_of(case: str) -> tuple[SwitchConfig, dict[str, np.ndarray]]:
    """Returns the configuration and T5X's arrays of a golden model, with a vocabulary of bytes."""
    config, arrays = golden(case)
    arrays["token_embedder/embedding"] = np.resize(arrays["token_embedder/embedding"], (BYTES, config.d_model))
    return dataclasses.replace(config, vocab_size=BYTES), arrays


def t5x(case="t5_1_0", change=dict):
    config, arrays = model_of(case)
    return t5x_checkpoints.write(pathlib.Path("there"), change(arrays), inline=0), config


def orbax(case="t5_1_0", change=dict):
    config, arrays = model_of(case)
    return write_orbax(pathlib.Path("there").resolve(), change(arrays)), config


def scanned(arrays):
    depths = {"encoder": 2, "decoder": 3}
    return t5x_checkpoints.scanned(t5x_checkpoints.with_layer_biases(arrays, depths), depths)


def mesh(case="t5_1_0", change=dict):
    config, arrays = model_of(case)
    variables = mesh_tensorflow_checkpoints.variables_from(change(arrays), BLOCKS[case])
    return mesh_tensorflow_checkpoints.write(pathlib.Path("there"), variables), config


def hugging_face(case="t5_1_1"):
    return pathlib.Path(shutil.copytree(GOLDEN / case, "there")), None


def ours():
    conversion.to_switch_tf(conversion.from_hugging_face(GOLDEN / "t5_1_1"), "there")
    return pathlib.Path("there"), None


def cut(name, end=-60):
    """Returns a function that cuts the end off the only file of a folder that a pattern names."""
    def act(folder):
        (path,) = folder.glob(name)
        path.write_bytes(path.read_bytes()[:end])
    return act


def remove(name):
    def act(folder):
        for path in list(folder.glob(name)):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    return act


def fill(name, content):
    def act(folder):
        for path in [*folder.glob(name)] or [folder / name]:
            path.write_bytes(content.encode() if isinstance(content, str) else content)
    return act


def steps(*actions):
    return lambda folder: [act(folder) for act in actions]


def fewer_experts(arrays):
    return {**arrays, EXPERTS: arrays[EXPERTS][:3]}


def no_experts(arrays):
    return {name: values for name, values in arrays.items() if name != EXPERTS}


def lost_expert(folder):
    tensors = tensors_of("switch")
    copy("switch", folder, {name: tensors[name] for name in tensors if "encoder.block.1.layer.1.mlp.experts.expert_3"
                            not in name})


def program(folder):
    with zipfile.ZipFile(folder / "pytorch_model.bin", "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({"w": Code()}, 2))


def header_of(length):
    def act(folder):
        path = folder / "model.safetensors"
        path.write_bytes(struct.pack("<Q", length) + path.read_bytes()[8:])
    return act


def largest_of_database(folder):
    path = max(folder.rglob("d/*"), key=lambda path: path.stat().st_size)
    path.write_bytes(path.read_bytes()[:100])


def nothing(folder):
    """The files are whole; what is wrong is their configuration, or a part that was never written."""


DAMAGED = {
    "t5x, a truncated chunk": (t5x, cut(f"{KERNEL}/0.1"), (
        "'target/encoder/layers_0/mlp/wi/kernel' cannot be read (", "Not enough data",
        f"download there/{KERNEL} again.")),
    "t5x, a missing chunk": (t5x, remove(f"{KERNEL}/0.1"), ("0.1\" is missing", f"download there/{KERNEL} again.")),
    "t5x, a pointer as a chunk": (t5x, fill(f"{KERNEL}/0.1", POINTER),
                                  (f"there/{KERNEL}/0.1 is a pointer of Git LFS", "git lfs pull")),
    "t5x, a truncated msgpack file": (t5x, cut("checkpoint"), ("is truncated or no checkpoint of T5X", AGAIN)),
    "t5x, a pointer": (t5x, fill("checkpoint", POINTER), ("there/checkpoint is a pointer of Git LFS", "git lfs pull")),
    "t5x, a pickle": (t5x, fill("checkpoint", pickle.dumps({"target": Code()})), ("no checkpoint of T5X", AGAIN)),
    "t5x, an old pickle": (t5x, fill("checkpoint", pickle.dumps({"target": Code()}, 0)), NO_FORMAT),
    "t5x, a pickle of another name": (t5x, steps(remove("*"), fill("model.pkl", pickle.dumps(Code()))), NO_FORMAT),
    "t5x, an expert too few": (functools.partial(t5x, "switch", fewer_experts), nothing,
                               ("has shape (3, 16, 24), but its configuration asks for (4, 16, 24)", GIN_FILE)),
    "orbax, truncated values": (orbax, largest_of_database, ("cannot be read", "download there/state again.")),
    "orbax, a truncated description": (orbax, cut("state/_METADATA", 200), ("_METADATA is not JSON", AGAIN)),
    "mesh, no values": (mesh, remove("*.data-*"), ("lacks model.ckpt-7.data-00000-of-...", "; download it too.")),
    "mesh, a truncated index": (mesh, cut("*.index"), ("model.ckpt-7.index cannot be read", AGAIN)),
    "mesh, a pointer as index": (mesh, fill("*.index", POINTER), ("is a pointer of Git LFS", "git lfs pull")),
    "mesh, a pointer as values": (mesh, fill("*.data-*", POINTER), ("is a pointer of Git LFS", "git lfs pull")),
    "mesh, an expert too few": (functools.partial(mesh, "switch", fewer_experts), nothing, ("(3, 16, 24)", GIN_FILE)),
    "mesh, no experts": (functools.partial(mesh, "switch", no_experts), nothing, ("MoE1D/wi/kernel' of", GIN_FILE)),
    "hugging face, truncated": (hugging_face, cut("*.safetensors"), ("is truncated or no safetensors file", AGAIN)),
    "hugging face, a long header": (hugging_face, header_of(10**9), ("its header of 1000000000 bytes", AGAIN)),
    "hugging face, a pointer": (hugging_face, fill("*.safetensors", POINTER), ("a pointer of Git LFS", "git lfs pull")),
    "hugging face, a pointer as configuration": (hugging_face, fill("config.json", POINTER), ("git lfs pull",)),
    "hugging face, no tensors": (hugging_face, remove("*.safetensors"), ("neither", "download one of them into it.")),
    "hugging face, a missing shard": (hugging_face, steps(remove("*.safetensors"), fill(
        "model.safetensors.index.json", '{"weight_map": {"shared.weight": "model-00002-of-00002.safetensors"}}')),
        ("which is not in there", "; download it too.")),
    "hugging face, a pointer as shard": (hugging_face, steps(
        remove("*.safetensors"), fill("1.safetensors", POINTER), fill(
            "model.safetensors.index.json", '{"weight_map": {"shared.weight": "1.safetensors"}}')), ("git lfs pull",)),
    "hugging face, code": (hugging_face, steps(remove("*.safetensors"), program), (
        "posix.mkdir", "; take the model.safetensors of the same model.")),
    "hugging face, a plain pickle": (hugging_face, steps(remove("*.safetensors"), fill(
        "pytorch_model.bin", pickle.dumps({"w": Code()}))), ("is not a zip archive", "; download it again, take")),
    "hugging face, an expert lost": (functools.partial(hugging_face, "switch"), lost_expert, (
        "lacks 'encoder.block.1.layer.1.mlp.experts.expert_3.wi.weight'", "with its own config.json.")),
    "ours, truncated": (ours, cut("state.data-*"), ("bytes but has", "; copy it again, or use another checkpoint.")),
    "ours, no values": (ours, remove("state.data-*"), ("but has nothing", "; copy it again, or use another")),
    "ours, a pointer as description": (ours, fill("checkpoint.json", POINTER), ("no readable checkpoint.json", "copy")),
    "an empty folder": (hugging_face, remove("*"), NO_FORMAT),
}
# The others answer alike; a second for each two.
FIRST = ("t5x, a truncated chunk", "t5x, a missing chunk", "t5x, a truncated msgpack file", "t5x, a pickle",
         "t5x, an expert too few", "mesh, no values", "mesh, no experts", "hugging face, a long header",
         "hugging face, a pointer", "hugging face, a missing shard", "hugging face, code", "ours, truncated",
         "an empty folder", "t5x, another vocabulary", "t5x, scanned", "t5x, not scanned", "mesh, d_ff", "d_ff")
SHAPE = "but its configuration asks for"
# More of them are in the tests of each format.
OTHER_MODELS = {
    "t5x, another vocabulary": (t5x, {"vocab_size": 512}, (f"(384, 16), {SHAPE} (512, 16)", GIN_FILE)),
    "t5x, not scanned": (t5x, {"relative_attention_per_layer": True}, (
        "one for each stack; give a --gin_file without it.",)),
    "t5x, scanned": (functools.partial(t5x, change=scanned), {}, (
        "add --gin.SwitchConfig.relative_attention_per_layer=True to the --gin_file of its model.",)),
    "orbax, d_ff": (orbax, {"d_ff": 32}, (f"(16, 24), {SHAPE} (16, 32)", GIN_FILE)),
    "mesh, d_ff": (mesh, {"d_ff": 32}, (f"(16, 24), {SHAPE} (16, 32)", GIN_FILE)),
    "mesh, more layers": (mesh, {"num_encoder_layers": 3}, ("has 2 layers, but", "give the --gin_file of its model.")),
    "d_ff": (hugging_face, {"d_ff": 32}, (f"(24, 16), {SHAPE} (32, 16)",)),
    "heads": (hugging_face, {"num_heads": 4}, (f"(8, 3), {SHAPE} (8, 4)",)),
    "more layers": (hugging_face, {"num_layers": 3}, (
        "config.json says num_layers=3, but the checkpoint's encoder ends after 2",)),
}


def assert_refused(config, parts, capsys):
    """Both commands say the same sentence, with these parts, and leave nothing."""
    files = []
    if config is not None:
        pathlib.Path("model.gin").write_text(model_gin.gin_text(config))
        files = ["--gin_file=model.gin"]
    before = sorted(path.name for path in pathlib.Path().iterdir())
    for words in (["convert", "--input=there", "--output=out", *files],
                  [TRAIN[0], *(files or ["--gin_file=gin/models/t5_tiny.gin"]), *TRAIN[1:]]):
        assert main.main(words) == 2
        *_, message = capsys.readouterr().err.splitlines()
        assert message.startswith(f"switch-tf {words[0]}: ") and message.endswith(".")
        assert not re.search(r"\. [A-Z]|\.\.$|Traceback", message), message  # one sentence
        for part in parts:
            assert part in message
        assert sorted(path.name for path in pathlib.Path().iterdir()) == before


def some_first(table):
    return [case if case in FIRST else pytest.param(case, marks=pytest.mark.slow) for case in table]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("switch_tf.data.check_examples", lambda description: None)  # which takes a second


@pytest.mark.parametrize("case", some_first(DAMAGED))
def test_damaged_checkpoints(case, capsys):
    write, damage, parts = DAMAGED[case]
    folder, config = write()
    damage(folder)
    assert_refused(config, parts, capsys)
    assert not pathlib.Path("harm").exists()


@pytest.mark.parametrize("case", some_first(OTHER_MODELS))
def test_configurations_of_other_models(case, capsys):
    write, changes, parts = OTHER_MODELS[case]
    folder, config = write()
    if config is None:
        copy("t5_1_1", folder, **changes)
    else:
        config = dataclasses.replace(config, **changes)
    assert_refused(config, parts, capsys)
