"""Writes checkpoints as Mesh TensorFlow does, with TensorFlow 1's Saver, with names from literal tables.

The tables follow `mesh_tensorflow/transformer/transformer.py`, `transformer_layers.py`, `attention.py` and `moe.py`,
and know nothing of the reader. Mesh TensorFlow's arrays have the axes of T5X's.
"""

import pathlib
import re

import numpy as np
import tensorflow as tf

# T5X's name of a layer's array -> number of the sublayer, Mesh TensorFlow's name in it. N is the norm, G the router.
ENCODER_LAYER = {
    "pre_attention_layer_norm/scale": (0, "N/scale"),
    "attention/query/kernel": (0, "SelfAttention/q"),
    "attention/key/kernel": (0, "SelfAttention/k"),
    "attention/value/kernel": (0, "SelfAttention/v"),
    "attention/out/kernel": (0, "SelfAttention/o"),
    "pre_mlp_layer_norm/scale": (1, "N/scale"),
    "mlp/wi/kernel": (1, "DenseReluDense/wi/kernel"),
    "mlp/wi_0/kernel": (1, "DenseReluDense/wi_0/kernel"),
    "mlp/wi_1/kernel": (1, "DenseReluDense/wi_1/kernel"),
    "mlp/wo/kernel": (1, "DenseReluDense/wo/kernel"),
    "mlp/router/router_weights/w/kernel": (1, "MoE1D/G/kernel"),
    "mlp/expert/wi/kernel": (1, "MoE1D/wi/kernel"),
    "mlp/expert/wi_0/kernel": (1, "MoE1D/wi_0/kernel"),
    "mlp/expert/wi_1/kernel": (1, "MoE1D/wi_1/kernel"),
    "mlp/expert/wo/kernel": (1, "MoE1D/wo/kernel"),
}
DECODER_LAYER = {
    "pre_self_attention_layer_norm/scale": (0, "N/scale"),
    "self_attention/query/kernel": (0, "SelfAttention/q"),
    "self_attention/key/kernel": (0, "SelfAttention/k"),
    "self_attention/value/kernel": (0, "SelfAttention/v"),
    "self_attention/out/kernel": (0, "SelfAttention/o"),
    "pre_cross_attention_layer_norm/scale": (1, "N/scale"),
    "encoder_decoder_attention/query/kernel": (1, "EncDecAttention/q"),
    "encoder_decoder_attention/key/kernel": (1, "EncDecAttention/k"),
    "encoder_decoder_attention/value/kernel": (1, "EncDecAttention/v"),
    "encoder_decoder_attention/out/kernel": (1, "EncDecAttention/o"),
    **{name: (2, theirs) for name, (number, theirs) in ENCODER_LAYER.items() if number == 1},
}
OTHERS = {
    "token_embedder/embedding": "shared/embedding",
    "encoder/relpos_bias/rel_embedding": "encoder/block_000/layer_000/SelfAttention/relative_attention_bias",
    "decoder/relpos_bias/rel_embedding": "decoder/block_000/layer_000/SelfAttention/relative_attention_bias",
    "encoder/encoder_norm/scale": "encoder/F/scale",
    "decoder/decoder_norm/scale": "decoder/F/scale",
    "decoder/logits_dense/kernel": "decoder/logits/kernel",
}
LAYERS = {"encoder": (ENCODER_LAYER, 2), "decoder": (DECODER_LAYER, 3)}


def variables_from(arrays: dict[str, np.ndarray], layers_per_block: int = 1, norm: str = "rms_norm",
                   gating: str = "switch_gating") -> dict[str, np.ndarray]:
    """Returns the variables of a checkpoint, name -> values.

    Args:
        arrays: T5X's name -> <float32> values.
        layers_per_block: Layers in the block that both stacks repeat, 2 if dense and sparse layers take turns.
        norm: "rms_norm", or "layer_norm" as by its legacy LayerStack.
        gating: Name of the routers.
    """
    final = {"rms_norm": "rms_norm", "layer_norm": "final_layer_norm"}[norm]
    variables = {}
    for name, values in arrays.items():
        if match := re.fullmatch(r"(encoder|decoder)/layers_(\d+)/(.+)", name):
            table, num_sublayers = LAYERS[match[1]]
            block, place = divmod(int(match[2]), layers_per_block)
            sublayer, rest = (0, "SelfAttention/relative_attention_bias") if match[3].startswith("relpos") else table[
                match[3]]
            theirs = f"{match[1]}/block_{block:03d}/layer_{place * num_sublayers + sublayer:03d}/{rest}"
        else:
            theirs = OTHERS[name]
        for letter, name in (("N", norm), ("F", final), ("G", gating)):
            theirs = theirs.replace(f"/{letter}/", f"/{name}/")
        variables[theirs] = values
    assert len(variables) == len(arrays)
    return variables


def write(folder: pathlib.Path, variables: dict[str, np.ndarray], step: int = 7, dtype: str = "float32",
          has_slots: bool = False, num_shards: int = 1) -> pathlib.Path:
    """Writes a checkpoint.

    Args:
        folder: Folder, made if it is missing.
        variables: Name -> <float32> values.
        step: Number of the checkpoint.
        dtype: Type of the stored weights.
        has_slots: Whether Adafactor's slots are stored beside the weights, without finite values.
        num_shards: Number of files with values.
    """
    folder.mkdir(exist_ok=True)
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        made = []
        for index, (name, values) in enumerate(variables.items()):
            with tf.device(f"CPU:{index % num_shards}"):
                made.append(_variable(name, tf.cast(values, dtype)))
                for slot, shape in _slots(values.shape) if has_slots else ():
                    _variable(f"{name}_slot_{slot}", tf.fill(shape, np.float32("nan")))
        with tf.device("CPU:0"):
            tf.compat.v1.get_variable("global_step", initializer=np.int64(step), use_resource=False)
        session.run(tf.compat.v1.global_variables_initializer())
        saver = tf.compat.v1.train.Saver(sharded=True, save_relative_paths=True)
        saver.save(session, str(folder / "model.ckpt"), global_step=step, write_meta_graph=False)
    return folder


def _variable(name, value):
    return tf.compat.v1.get_variable(name, initializer=value, use_resource=False)


def _slots(shape):
    yield "m", shape
    yield from (("vr", shape[:-1]), ("vc", (*shape[:-2], shape[-1]))) if len(shape) > 1 else (("v", shape),)
