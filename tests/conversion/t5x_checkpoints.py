"""Writes T5X checkpoints as T5X does, from Hugging Face's tensors, with names from literal tables.

The tables follow `t5x/examples/t5/network.py`, Flaxformer's `moe_architecture.py` and Hugging Face's classes, and know
nothing of the reader.
"""

import pathlib

import flax.serialization
import ml_dtypes
import numpy as np
import tensorstore

# T5X's name of a layer's array -> Hugging Face's, whose kernels are transposed.
ENCODER_LAYER = {
    "attention/query/kernel": "layer.0.SelfAttention.q.weight",
    "attention/key/kernel": "layer.0.SelfAttention.k.weight",
    "attention/value/kernel": "layer.0.SelfAttention.v.weight",
    "attention/out/kernel": "layer.0.SelfAttention.o.weight",
    "pre_attention_layer_norm/scale": "layer.0.layer_norm.weight",
    "pre_mlp_layer_norm/scale": "layer.1.layer_norm.weight",
    "mlp/wi/kernel": "layer.1.MLP.wi.weight",
    "mlp/wi_0/kernel": "layer.1.MLP.wi_0.weight",
    "mlp/wi_1/kernel": "layer.1.MLP.wi_1.weight",
    "mlp/wo/kernel": "layer.1.MLP.wo.weight",
    "mlp/router/router_weights/w/kernel": "layer.1.mlp.router.classifier.weight",
    "mlp/expert/wi/kernel": "layer.1.mlp.experts.expert_E.wi.weight",
    "mlp/expert/wo/kernel": "layer.1.mlp.experts.expert_E.wo.weight",
}
DECODER_LAYER = {
    "self_attention/query/kernel": "layer.0.SelfAttention.q.weight",
    "self_attention/key/kernel": "layer.0.SelfAttention.k.weight",
    "self_attention/value/kernel": "layer.0.SelfAttention.v.weight",
    "self_attention/out/kernel": "layer.0.SelfAttention.o.weight",
    "pre_self_attention_layer_norm/scale": "layer.0.layer_norm.weight",
    "encoder_decoder_attention/query/kernel": "layer.1.EncDecAttention.q.weight",
    "encoder_decoder_attention/key/kernel": "layer.1.EncDecAttention.k.weight",
    "encoder_decoder_attention/value/kernel": "layer.1.EncDecAttention.v.weight",
    "encoder_decoder_attention/out/kernel": "layer.1.EncDecAttention.o.weight",
    "pre_cross_attention_layer_norm/scale": "layer.1.layer_norm.weight",
    "pre_mlp_layer_norm/scale": "layer.2.layer_norm.weight",
    **{ours: theirs.replace("layer.1", "layer.2") for ours, theirs in ENCODER_LAYER.items() if ours.startswith("mlp")},
}
OTHERS = {
    "token_embedder/embedding": "shared.weight",
    "encoder/relpos_bias/rel_embedding":
        "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
    "decoder/relpos_bias/rel_embedding":
        "decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
    "encoder/encoder_norm/scale": "encoder.final_layer_norm.weight",
    "decoder/decoder_norm/scale": "decoder.final_layer_norm.weight",
    "decoder/logits_dense/kernel": "lm_head.weight",
}


def names(num_encoder_layers: int, num_decoder_layers: int) -> dict[str, str]:
    """Returns T5X's name -> Hugging Face's of every array that a model may have."""
    return {**{f"encoder/layers_{i}/{ours}": f"encoder.block.{i}.{theirs}" for i in range(num_encoder_layers)
               for ours, theirs in ENCODER_LAYER.items()},
            **{f"decoder/layers_{i}/{ours}": f"decoder.block.{i}.{theirs}" for i in range(num_decoder_layers)
               for ours, theirs in DECODER_LAYER.items()}, **OTHERS}


def arrays_from(tensors: dict[str, np.ndarray], num_encoder_layers: int, num_decoder_layers: int,
                is_tied: bool) -> dict[str, np.ndarray]:
    """Returns T5X's arrays, name -> values, given those of Hugging Face."""
    tensors = {name.replace("DenseReluDense", "MLP"): tensor for name, tensor in tensors.items()}
    # Their Switch Transformers call a dense layer "mlp" as well.
    tensors |= {name.replace(".mlp.w", ".MLP.w"): tensor for name, tensor in tensors.items()}
    arrays = {}
    for ours, theirs in names(num_encoder_layers, num_decoder_layers).items():
        if theirs == "lm_head.weight" and is_tied:
            continue
        experts = [theirs.replace("_E.", f"_{e}.") for e in range(100)] if "_E." in theirs else []
        if experts:
            held = [tensors[name].T for name in experts if name in tensors]
            if held:
                arrays[ours] = np.stack(held)  # experts first
        elif theirs in tensors:
            tensor = tensors[theirs]
            arrays[ours] = np.array(tensor if theirs == "shared.weight" else tensor.T)
    return arrays


def nested(arrays: dict) -> dict:
    """Returns "a/b" -> value as {"a": {"b": value}}."""
    tree: dict = {}
    for name, value in arrays.items():
        *path, last = name.split("/")
        node = tree
        for key in path:
            node = node.setdefault(key, {})
        node[last] = value
    return tree


def _chunks(shape):
    """Splits the longest axis in two, or in the smallest parts possible."""
    axis = max(range(len(shape)), key=lambda i: shape[i])
    part = next(size for size in (shape[axis] // 2, shape[axis] // 3, shape[axis]) if size and shape[axis] % size == 0)
    return [part if i == axis else size for i, size in enumerate(shape)]


def write(folder: pathlib.Path, arrays: dict[str, np.ndarray], dtype: str = "float32", reference: str = "spec",
          inline: int = 20, slots: dict[str, dict[str, np.ndarray]] | None = None, step: int = 7) -> pathlib.Path:
    """Writes a checkpoint.

    Args:
        folder: Folder to make.
        arrays: Name below "target" -> <float32> values.
        dtype: Name of the dtype on disk.
        reference: "spec", "old_spec" as before tensorstore 0.1.14 on gs://, or "placeholder" as Orbax wrote it.
        inline: Arrays of at most so many elements are in the msgpack file.
        slots: Name of a weight -> name of a slot -> <float32> values. By default a slot v like the weight, in the file.
        step: Number of steps.
    """
    folder.mkdir(parents=True)

    def leaf(name, values, dtype):
        values = np.asarray(values).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
        place = name.replace("/", ".")
        return values if values.size <= inline else _write_array(folder, place, values, dtype, reference)

    param_states = {name: {"v": values} for name, values in arrays.items()} if slots is None else {
        name: slots[name] and {slot: leaf(f"state/param_states/{name}/{slot}", values, "float32")
                               for slot, values in slots[name].items()} for name in slots}
    tree = {"target": nested({name: leaf(f"target/{name}", values, dtype) for name, values in arrays.items()}),
            "state": {"step": np.int32(step), "param_states": nested(param_states)}}
    content = tree if reference == "placeholder" else {"version": 3, "optimizer": tree}
    (folder / "checkpoint").write_bytes(flax.serialization.to_bytes(content))
    return folder


def _write_array(folder, place, values, dtype, reference):
    """Writes a zarr folder; returns the leaf that stands for it."""
    spec = {"driver": "zarr", "dtype": dtype, "kvstore": {"driver": "file", "path": place},
            "metadata": {"compressor": {"id": "gzip"}, "shape": list(values.shape), "chunks": _chunks(values.shape)}}
    on_disk = {**spec, "kvstore": {"driver": "file", "path": str(folder / place), "file_io_sync": False}}
    tensorstore.open(on_disk, create=True, open=True).result().write(values).result()
    return {"spec": tensorstore.Spec(spec).to_json(),
            "old_spec": {**spec, "kvstore": {"driver": "gcs", "bucket": "t5x-dummy-bucket"}, "path": place},
            "placeholder": f"PLACEHOLDER://{place}"}[reference]


def with_layer_biases(arrays: dict[str, np.ndarray], num_layers: dict[str, int]) -> dict[str, np.ndarray]:
    """Returns arrays in which each layer has its stack's position bias, as scanned layers have one each."""
    arrays = dict(arrays)
    for stack, count in num_layers.items():
        bias = arrays.pop(f"{stack}/relpos_bias/rel_embedding")
        arrays |= {f"{stack}/layers_{i}/relpos_bias/rel_embedding": bias for i in range(count)}
    return arrays


def scanned(arrays: dict[str, np.ndarray], num_layers: dict[str, int], subblocks: dict[str, int] | None = None,
            axis: int = 1) -> dict[str, np.ndarray]:
    """Returns the arrays of a scanned model.

    Args:
        arrays: Those of single layers, with a position bias for each.
        num_layers: "encoder" and "decoder" -> number of layers.
        subblocks: Stack -> number of layers in a scanned block of Flaxformer's MoE models. None for plain layers.
        axis: Axis of the blocks.
    """
    result = {name: values for name, values in arrays.items() if "/layers_" not in name}
    for stack, count in num_layers.items():
        period = subblocks[stack] if subblocks else 1
        for place in range(period):
            middle = f"subblock_{place}/" if subblocks else ""
            for name in arrays:
                if name.startswith(f"{stack}/layers_{place}/"):
                    rest = name.removeprefix(f"{stack}/layers_{place}/")
                    result[f"{stack}/{stack}/{middle}{rest}"] = np.stack(
                        [arrays[f"{stack}/layers_{i}/{rest}"] for i in range(place, count, period)], axis)
    return result
