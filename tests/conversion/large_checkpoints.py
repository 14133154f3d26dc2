"""Synthetic bfloat16 checkpoints with many experts, written expert by expert, so that they may be larger than memory.

As a script: `python -m tests.conversion.large_checkpoints FOLDER hugging_face 1024 128` writes 8.7 GB of d_model 1024.
"""

import json
import pathlib
import struct
import sys

import flax.serialization
import ml_dtypes
import numpy as np
import tensorstore

from switch_tf import SwitchConfig
from switch_tf.conversion import huggingface, huggingface_config, t5x, weight_source

VOCABULARY, LAYERS = 32128, 4
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def config_of(d_model: int, num_experts: int) -> SwitchConfig:
    """Returns a configuration with four sparse layers, two in each stack."""
    return SwitchConfig(vocab_size=VOCABULARY, d_model=d_model, d_ff=4 * d_model, d_kv=64, num_heads=d_model // 64,
                        num_encoder_layers=LAYERS, num_decoder_layers=LAYERS, num_experts=num_experts,
                        semantics="hf", expert_capacity=16)


def _values(seed, shape):
    """Returns <bfloat16>[*shape], different for every seed."""
    size = int(np.prod(shape))
    base = np.random.default_rng(0).standard_normal(min(size, 2**22), np.float32) / 32
    return np.roll(np.resize(base, size), 7919 * seed + 1).astype(_BFLOAT16).reshape(shape)


def write_hugging_face(folder: pathlib.Path, config: SwitchConfig) -> pathlib.Path:
    """Writes config.json and model.safetensors, one tensor at a time."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(huggingface_config.to_hugging_face(config, None)))
    links = huggingface.rules_of(config).link(weight_source.weights_of(config))
    shapes = {name: link.their_shape for link in links for name in link.theirs}
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for seed, shape in enumerate(shapes.values()):
            file.write(_values(seed, shape).view(np.uint8).data)
    return folder


def write_t5x(folder: pathlib.Path, config: SwitchConfig) -> pathlib.Path:
    """Writes a T5X checkpoint of zarr arrays. Chunks hold eight experts each."""
    folder.mkdir(parents=True)
    tree: dict = {}
    for seed, link in enumerate(t5x.RULES.link(weight_source.weights_of(config))):
        (name,), shape = link.theirs, link.their_shape
        place, step = name.replace("/", "."), 8 if "/expert/" in name else shape[0]
        array = tensorstore.open(
            {"driver": "zarr", "kvstore": {"driver": "file", "path": str(folder / place), "file_io_sync": False},
             "metadata": {"compressor": None, "shape": shape, "chunks": [min(step, shape[0]), *shape[1:]],
                          "dtype": "bfloat16"}}, create=True).result()
        for start in range(0, shape[0], step):
            part = array[start:start + step]
            part.write(_values(seed + start, tuple(part.shape))).result()
        node, (*path, last) = tree, name.split("/")
        for key in path:
            node = node.setdefault(key, {})
        node[last] = f"PLACEHOLDER://{place}"
    (folder / "checkpoint").write_bytes(flax.serialization.to_bytes({"version": 3, "optimizer": tree}))
    return folder


WRITERS = {"hugging_face": write_hugging_face, "t5x": write_t5x}

if __name__ == "__main__":
    folder, kind, d_model, num_experts = sys.argv[1:]
    WRITERS[kind](pathlib.Path(folder), config_of(int(d_model), int(num_experts)))
