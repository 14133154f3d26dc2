"""Weights made from checkpoints: by sparse upcycling (arXiv 2212.05055), and by the mean."""

import dataclasses
import functools
import pathlib
import zlib

import numpy as np

import switch_tf
from switch_tf import partitioning
from switch_tf.checkpoints import folders
from switch_tf.configs import policies
from switch_tf.configs.switch_config import SwitchConfig
from switch_tf.conversion import formats, own, source_vocabulary, weight_source
from switch_tf.conversion.formats import Format
from switch_tf.conversion.weight_source import WeightSource, model_weights, read_model, variables_of, weights_of
from switch_tf.layers import grouping
from switch_tf.models.stack import switch_feed_forward
from switch_tf.models.switch_transformer import SwitchTransformer
from switch_tf.optim.adafactor import Adafactor
from switch_tf.optim.factoring import factor_dimensions, slot_dimensions
from switch_tf.surgery import kernels, sources
from switch_tf.surgery.kernels import Changes


def _origin(name, config):
    """Returns a weight's sparse layer, such as "encoder/layers_1", and the dense weight that it is made from.

    The layer is None outside of experts and routers, the dense weight None for a router.
    """
    layer = next((one for one in config.sparse_layer_names if name.startswith(f"{one}/mlp/")), None)
    if layer is None:
        return None, name
    kind, _, weight = name.removeprefix(f"{layer}/mlp/").partition("/")
    return layer, f"{layer}/mlp/{weight}" if kind == "experts" else None


def upcycle(dense: SwitchTransformer, config: SwitchConfig, changes: Changes) -> SwitchTransformer:
    """Returns the model of `open_upcycled`, with float32 weights, for a dense model in memory."""
    return read_model(open_upcycled(model_weights(dense), config, changes))


def open_upcycled(dense: WeightSource, config: SwitchConfig, changes: Changes) -> WeightSource:
    """Returns the weights of a sparse model with copies of a dense model's layers as experts.

    Reading experts takes their memory and one dense kernel's. Draws depend only on the seed, the layer, the kernel and
    the expert.

    Args:
        config: Of the sparse model, with all else equal. Its routers are drawn.
    """
    num_slices, width = sources.check_compatible(dense.config, config), config.expert_width
    weights = weights_of(config)
    origins = {name: _origin(name, config) for name in weights}
    order = {name: place for place, name in enumerate(dense.weights)}

    def generator(*place):
        return np.random.default_rng([changes.seed, zlib.crc32("/".join(map(str, place)).encode())])

    @functools.cache
    def scale(layer):
        if changes.gate_scale != "auto":
            return changes.gate_scale
        return gate_scale(gate_sums(WeightSource(config, weights, read), layer), num_slices)

    def router_weight(layer, name):
        """A policy's weights and state start as in a new model."""
        if name == "kernel":
            return kernels.router_kernel(config.d_model, config.num_experts, num_slices, config.init_scale,
                                         generator(layer, "router"))
        policy = policies.get(config.routing(layer.startswith("decoder"))[0])
        declared = policy.router_weights(config.d_model, config.num_experts)
        if name not in declared:
            return np.zeros(config.num_experts, np.float32)
        shape, _, initial = declared[name]
        return kernels.draw(shape, config.init_scale, generator(layer, "router", name)) if initial is None else (
            np.full(shape, initial, np.float32))

    def read(name, rows):
        layer, origin = origins[name]
        if layer is None:
            return dense.read(name, rows)
        if origin is None:
            return router_weight(layer, name.rpartition("/")[2])[rows]
        # Contiguous, because sums of a transposed array round differently.
        kernel, axis = np.ascontiguousarray(dense.read(origin, slice(None))), int(not origin.endswith("/wo"))
        spread, made = changes.noise * float(kernel.std()), []
        for expert in range(config.num_experts)[rows]:
            drawn = generator(layer, "units", expert).choice(
                width, size=round(changes.reinitialize * width), replace=False)  # the same in all kernels of the expert
            made.append(kernels.expert_kernel(kernel, axis, width, expert, drawn, spread, generator(origin, expert)))
        return np.stack(made) * np.float32(scale(layer)) if axis == 0 else np.stack(made)

    # In the order of the dense model, so that successive reads are close.
    names = sorted(origins, key=lambda name: order.get(origins[name][1], -1))
    return WeightSource(config, {name: weights[name] for name in names}, read)


def gate_sums(source: WeightSource, layer: str) -> np.ndarray:
    """Returns the sum of each token's gates in a sparse layer, <float32>[tokens], at inference without dropped tokens.

    Tokens are random, and the layer's norm scales their hidden states.
    """
    config, num_tokens = source.config, 1024
    sparse = switch_feed_forward(config, layer.startswith("decoder"), "float32")
    sparse.build((None, None, config.d_model))
    for variable in sparse.router.weights:
        variable.assign(source.read(f"{layer}/mlp/router/{variable.name}", slice(None)))
    random = np.random.RandomState(0)
    tokens = random.standard_normal((1, num_tokens, config.d_model)).astype("float32")
    tokens *= source.read(f"{layer}/pre_mlp_layer_norm/scale", slice(None))
    capacity = grouping.expert_capacity(num_tokens, config.grouping, training=False) if (
        sparse.router.experts_choose) else num_tokens
    token_ids = random.randint(1, config.vocab_size, (1, num_tokens))
    decisions, _ = sparse.router(tokens, expert_capacity=capacity, token_ids=token_ids)
    return np.asarray(decisions.gates).sum(axis=-1)[0]


def gate_scale(sums: np.ndarray, num_slices: int) -> float:
    """Returns the factor of output kernels that keeps the mean size of a dense layer's output, to four digits.

    A token gets each of the `num_slices` slices of hidden units equally.
    """
    return float(f"{num_slices / sums.mean():.4g}")


def upcycled_adafactor(dense: SwitchTransformer, optimizer: Adafactor, sparse: SwitchTransformer) -> Adafactor:
    """Returns the Adafactor of an upcycled model, with the dense model's step and copies of its slots.

    A narrower expert gets its part of slots along hidden units, and all other slots. The routers' slots are new.
    """
    made, config = Adafactor(), sparse.config
    made.build(sparse.trainable_variables)
    made.iterations.assign(optimizer.iterations)
    old, num_slices = variables_of(dense), config.d_ff // config.expert_width
    for name, variable in variables_of(sparse).items():
        layer, origin = _origin(name, config)
        if origin is None:
            continue
        kernel, slots = old[origin], made.slots_of(variable)
        for slot, values in optimizer.slots_of(kernel).items():
            values = values.numpy()
            if layer is not None:
                axis, kept = int(not origin.endswith("/wo")), slot_dimensions(
                    kernel.shape, factor_dimensions(kernel.shape, partitioning.axes_of(kernel)))[slot]
                parts = np.split(values, num_slices, axis=kept.index(axis)) if axis in kept else [values] * num_slices
                values = np.stack([parts[expert % num_slices] for expert in range(config.num_experts)])
            slots[slot].assign(values)
    return made


def upcycle_checkpoint(source: pathlib.Path, source_format: Format, output: pathlib.Path, config: SwitchConfig,
                       changes: Changes, with_optimizer: bool = False) -> tuple[dict, str]:
    """Upcycles the weights of a folder, a portion at a time. After a kill, the same call resumes.

    Args:
        source_format: If it does not describe its model, it is read as the dense twin of `config`.
        output: New or empty folder.
        config, changes: See `open_upcycled`.
        with_optimizer: Whether to copy Adafactor's state. Takes the memory of both models, and begins anew after a
            kill.

    Returns:
        (JSON object, text for people).
    """
    twin, step, state = None if source_format.describes_model else sources.dense_twin(config), None, ""
    dense, vocabulary = source_format.module.open_weights(source, twin), source_vocabulary.find(source)
    upcycled = open_upcycled(dense, config, changes)
    if with_optimizer:
        model, sparse = read_model(dense), read_model(upcycled)
        optimizer = upcycled_adafactor(model, source_format.module.read_optimizer(source, model), sparse)
        own.write_weights(model_weights(sparse), output, vocabulary.content, optimizer=optimizer)
        step = int(optimizer.iterations.numpy())
        state = f" With the slots of Adafactor at step {step:,}."
    else:
        identity = formats.identity_of(source, source_format, formats.SWITCH_TF, output, config,
                                          vocabulary.content) | dataclasses.asdict(changes)
        own.write_weights(upcycled, output, vocabulary.content, identity)
    layers = config.sparse_layer_names
    sums = {layer: gate_sums(upcycled, layer) for layer in layers}
    name, lines = formats.start_from(output, vocabulary, step)
    slices = dense.config.d_ff // config.expert_width
    means = {layer: float(values.mean()) for layer, values in sums.items()}
    scales = {layer: gate_scale(values, slices) for layer, values in sums.items()}
    made_of = "a copy of the dense layer" if slices == 1 else f"one of {slices} slices of the dense layer"
    text = (f"{dense.config.num_parameters:,} parameters of {source} ({source_format.name}) became "
            f"{config.num_parameters:,} in {output}: {len(layers)} sparse layers of {config.num_experts} experts, each "
            f"{made_of}.{state}")
    return {"from": str(source), "format": source_format.name, "output": str(output),
            "num_parameters": config.num_parameters, "num_dense_parameters": dense.config.num_parameters,
            "sparse_layers": list(layers), "num_experts": config.num_experts, "expert_width": config.expert_width,
            "slices": slices, "step": step, "vocabulary": name, "gate_sums": means, "gate_scales": scales
            }, "\n".join([text, _advice(config, slices, changes.gate_scale, sums, scales), *lines])


def _advice(config, num_slices, scale, sums, scales):
    for is_decoder, layers in enumerate((config.encoder_sparse_layers, config.decoder_sparse_layers)):
        policy, count = policies.get(config.routing(bool(is_decoder))[0]), config.num_choices(bool(is_decoder))
        if layers and not policy.experts_choose and count < num_slices:
            return (f"A token of the {('encoder', 'decoder')[is_decoder]} gets {count} of the {num_slices} slices; "
                    f"routing_policy='top_n' with num_selected_experts={num_slices} gives it all of them.")

    def shown(values):
        low, high = f"{min(values):.4g}", f"{max(values):.4g}"
        return low if low == high else f"{low} to {high}"

    wanted, layers = shown(scales.values()), "layer" if len(scales) == 1 else "layers"
    is_even = all(np.ptp(values) < 1e-4 for values in sums.values())
    kept = "keeps the function of the dense model" if is_even else "keeps the mean size of the layers' outputs"
    if scale == "auto":
        return f"--gate_scale=auto was {wanted} and {kept}, as long as no token is dropped."
    if all(abs(scale / one - 1) < 0.01 for one in scales.values()):
        return f"--gate_scale={scale:.4g} {kept}, as long as no token is dropped."
    return (f"The gates of a token add up to {shown([one.mean() for one in sums.values()])} in the sparse {layers}, so "
            f"these start with {shown([scale / one for one in scales.values()])} of the dense layers' outputs; "
            f"--gate_scale=auto ({wanted}) {kept}.")


def open_mean(checkpoints: list[pathlib.Path]) -> WeightSource:
    """Returns the mean of the weights of checkpoints that `sources.check_same` accepted."""
    opened = [own.open_weights(checkpoint) for checkpoint in checkpoints]
    weights = opened[-1].weights

    def read(name, rows):
        total = sum((one.read(name, rows) for one in opened), np.zeros((), np.float64))
        return (total / len(opened)).astype(weights[name].dtype)

    return WeightSource(opened[-1].config, weights, read)


def average_run(run_folder: pathlib.Path, checkpoints: list[pathlib.Path], output: pathlib.Path) -> tuple[dict, str]:
    """Writes the mean of the weights of a run's checkpoints. After a kill, the same call resumes.

    Args:
        run_folder: Its vocabulary is copied.
        checkpoints: Oldest first, of one model.
        output: New or empty folder.

    Returns:
        (JSON object, text for people).
    """
    mean, vocabulary = open_mean(checkpoints), source_vocabulary.find(run_folder)
    identity = {"mean of": [folders.identity(folders.describe(checkpoint)) for checkpoint in checkpoints],
                "version of switch_tf": switch_tf.__version__, "size of a part": weight_source.LARGEST}
    own.write_weights(mean, output, vocabulary.content, identity)
    name, lines = formats.start_from(output, vocabulary)
    steps = [int(checkpoint.name.removeprefix("step_")) for checkpoint in checkpoints]
    result = {"run": str(run_folder), "steps": steps, "output": str(output),
              "num_parameters": mean.config.num_parameters, "vocabulary": name}
    shown = f"{', '.join(map(str, steps[:-1]))} and {steps[-1]}"
    text = f"{mean.config.num_parameters:,} parameters in {output}, the mean of steps {shown} of {run_folder}."
    return result, "\n".join([text, *lines])
