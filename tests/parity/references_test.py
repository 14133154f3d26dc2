"""The numbers of T5X, Flaxformer and Mesh TensorFlow: logits, losses of each router, and the next step of Adafactor.

Their own code made the checkpoints and the numbers (`make golden`), of models that drop tokens, with padded rows.
"""

import functools
import pathlib
import re
import zipfile

import numpy as np
import pytest
import tensorflow as tf

from switch_tf import SwitchConfig
from switch_tf.configs.run import StepSettings
from switch_tf.conversion import formats
from switch_tf.conversion.weight_source import read_model, variables_of
from switch_tf.training import train_step

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
# The others repeat what these show, for layers in one array, and for one more router.
T5X = ["t5", "switch", "st_moe", *(pytest.param(case, marks=pytest.mark.slow) for case in (
    "switch_scanned", "st_moe_scanned", "experts_choose"))]
# T5X's example has no gin file beside its checkpoint, and Mesh TensorFlow's does not describe its model.
T5 = SwitchConfig(vocab_size=64, d_model=16, d_ff=24, d_kv=4, num_heads=3, num_encoder_layers=2,
                  num_decoder_layers=1, activation="geglu", logits_via_embedding=False, dropout_rate=0.0)
MESH = {"vocab_size": 128, "d_model": 8, "d_ff": 12, "d_kv": 3, "num_heads": 2, "num_encoder_layers": 2,
        "num_decoder_layers": 2, "dropout_rate": 0.0, "num_experts": 4, "expert_d_ff": 20, "group_size": 16,
        "train_capacity_factor": 1.0, "eval_capacity_factor": 0.8, "min_expert_capacity": 1, "exploration": "argmax",
        "semantics": "mtf"}
MESH_CONFIGS = {
    "switch": SwitchConfig(**MESH),
    # Their top-2 gating has no z-loss.
    "experts_first": SwitchConfig(**MESH, encoder_sparse_indices=(0,), decoder_sparse_indices=(0,),
                                  routing_policy="top2", second_expert_policy="all", allow_non_causal_decoder=True,
                                  router_z_loss_weight=0.0)}
SETTINGS = StepSettings(z_loss_weight=1e-4)


@pytest.fixture(scope="module")
def golden(tmp_path_factory):
    """Returns a function of a case: its folder, its model as converted, its optimizer, and the reference's numbers."""

    @functools.cache
    def opened(case):
        folder = tmp_path_factory.mktemp("golden") / "checkpoint_3"
        with zipfile.ZipFile(GOLDEN / f"{case}.zip") as archive:
            archive.extractall(folder)
        if case.startswith("mesh_tensorflow"):
            source, config = formats.MESH_TENSORFLOW, MESH_CONFIGS[case.partition("/")[2]]
        else:
            source = formats.T5X
            config = T5 if case == "t5x/t5" else source.config_of(folder)
        model = read_model(source.module.open_weights(folder, config))
        with np.load(folder / "expected.npz") as numbers:
            return folder, model, source, dict(numbers)

    return opened


def with_weights(features):
    features = {name: tf.constant(value, "int32") for name, value in features.items()}
    return {**features, "decoder_loss_weights": tf.cast(features["decoder_target_tokens"] > 0, "int32")}


def features_of(numbers, batch):
    """Returns the features of a batch of T5X and its logits."""
    found = {name.removeprefix(f"{batch}/"): value for name, value in numbers.items() if name.startswith(f"{batch}/")}
    logits = found.pop("logits")
    return with_weights(found), logits


def mesh_features(numbers):
    """Returns the features of Mesh TensorFlow, which makes the decoder's inputs itself."""
    return with_weights({"encoder_input_tokens": numbers["inputs"], "decoder_target_tokens": numbers["targets"],
                         "decoder_input_tokens": np.pad(numbers["targets"], ((0, 0), (1, 0)))[:, :-1]})


def take_step(source, folder, model, features):
    """Returns StepMeasurements, and our name -> (value before, value after) of each weight, which is left as before."""
    optimizer = source.module.read_optimizer(folder, model)
    assert int(optimizer.iterations) == 3
    gradients, measured = train_step.compute_gradients(model, features, 0, optimizer.iterations.value, SETTINGS)
    variables = variables_of(model)
    before = {name: variable.numpy() for name, variable in variables.items()}
    optimizer.learning_rate = 0.05 if source is formats.MESH_TENSORFLOW else 0.01
    optimizer.apply(gradients, model.trainable_variables)
    after = {name: variable.numpy() for name, variable in variables.items()}
    for name, variable in variables.items():
        variable.assign(before[name])
    return measured, {name: (before[name], after[name]) for name in before}


# T5X and Flaxformer.


@pytest.mark.parametrize("batch", ["full", "inputs", "targets", "both", "odd", "packed"])
@pytest.mark.parametrize("case", T5X)
def test_logits_of_t5x(case, batch, golden):
    _, model, _, numbers = golden(f"t5x/{case}")
    features, expected = features_of(numbers, batch)
    logits = model.forward(features)[0].numpy()
    # Where there is no target, T5X's example, which routes nothing, attends to other positions.
    is_compared = features["decoder_target_tokens"].numpy() > 0 if case == "t5" else ...
    assert np.abs(expected[is_compared]).max() > 1.5
    np.testing.assert_allclose(logits[is_compared], expected[is_compared], rtol=0, atol=5e-6)


def by_layer(numbers, kind):
    """Returns layer -> value of a kind. A scanned model has one for each of its blocks of two layers."""
    found = {}
    for name, values in numbers.items():
        if name.startswith(f"{kind}/"):
            stack, place = re.search(r"/(\w+coder)/.*_(\d+)/mlp$", name).groups()
            found |= {f"{stack}/layers_{2 * block + int(place)}": value for block, value in enumerate(values)}
    return found


def name_in_t5x(name):
    name = name.replace("/experts/", "/expert/").replace("/router/", "/router/router_weights/w/")
    name = f"decoder/{name}" if name.startswith("logits_dense") else name
    return name if name.endswith(("kernel", "embedding", "scale")) else f"{name}/kernel"


def following_in_t5x(numbers, name):
    """Returns the first rows of a weight after T5X's step."""
    theirs = name_in_t5x(name)
    if f"next/{theirs}" in numbers:
        return numbers[f"next/{theirs}"]
    layer = int(re.search(r"layers_(\d+)", name)[1])
    scanned = re.sub(r"^(\w+)/layers_\d+", rf"next/\1/\1/subblock_{layer % 2}", theirs)
    return np.take(numbers[scanned], layer // 2, axis=1)


@pytest.mark.parametrize("case", T5X)
def test_losses_and_the_next_step_of_t5x(case, golden):
    folder, model, source, numbers = golden(f"t5x/{case}")
    measured, weights = take_step(source, folder, model, features_of(numbers, "both")[0])
    assert float(measured.loss.value) == pytest.approx(float(numbers["loss"]), abs=1e-5)
    assert float(measured.batch.loss_terms["z_loss"].value) == pytest.approx(float(numbers["z_loss"]), abs=1e-6)
    for name, kind in (("load_balancing_loss", "auxiliary_loss"), ("router_z_loss", "router_z_loss"),
                       ("fraction_tokens_dropped", "fraction_tokens_left_behind")):
        expected = by_layer(numbers, kind)
        assert expected.keys() == measured.batch.routers.keys()
        for layer, stats in measured.batch.routers.items():
            assert float(getattr(stats, name).value) == pytest.approx(float(expected[layer]), abs=1e-5), (name, layer)
    for name, (before, after) in weights.items():
        expected = following_in_t5x(numbers, name)
        before, after = (x.reshape(-1, *expected.shape[1:])[:len(expected)] for x in (before, after))
        assert np.abs(after - before).max() > 1e-3, name
        np.testing.assert_allclose(after, expected, rtol=0, atol=1e-6, err_msg=name)


# Mesh TensorFlow.


@pytest.mark.parametrize("case", MESH_CONFIGS)
def test_logits_of_mesh_tensorflow(case, golden):
    _, model, _, numbers = golden(f"mesh_tensorflow/{case}")
    features = mesh_features(numbers)
    logits, stats = model.forward(features)
    assert all(float(one.fraction_tokens_dropped.value) > 0.1 for one in stats)
    is_real = numbers["targets"] > 0
    assert numbers["logits"].std() > 0.5
    np.testing.assert_allclose(logits.numpy()[is_real], numbers["logits"][is_real], rtol=0, atol=1e-5)


def name_in_mesh_tensorflow(name):
    """Returns the name of a variable in a model whose stacks are one block of two layers."""
    match = re.fullmatch(r"(\w+)/layers_(\d)/(\w+)/(.*)", name)
    if match is None:
        return {"token_embedder/embedding": "shared/embedding",
                "encoder/encoder_norm/scale": "encoder/rms_norm/scale",
                "decoder/decoder_norm/scale": "decoder/rms_norm/scale"}.get(name) or name.replace(
                    "relpos_bias/rel_embedding", "block_000/layer_000/SelfAttention/relative_attention_bias")
    stack, layer, part, weight = match.groups()
    sublayers = ("self", "cross", "mlp") if stack == "decoder" else ("self", "mlp")
    place = next(i for i, kind in enumerate(sublayers) if re.search({
        "self": "^attention|self_attention|pre_attention", "cross": "cross|encoder_decoder", "mlp": "mlp"}[kind], part))
    prefix = f"{stack}/block_000/layer_{int(layer) * len(sublayers) + place:03}"
    if weight == "scale":
        return f"{prefix}/rms_norm/scale"
    if weight in ("query", "key", "value", "out"):
        kind = "EncDecAttention" if sublayers[place] == "cross" else "SelfAttention"
        return f"{prefix}/{kind}/{weight[0]}"
    experts = {"experts/wi": "MoE1D/wi", "experts/wo": "MoE1D/wo", "wi": "DenseReluDense/wi",
               "wo": "DenseReluDense/wo"}
    return f"{prefix}/{experts[weight]}/kernel" if weight in experts else f"{prefix}/MoE1D/{{gating}}/kernel"


@pytest.mark.parametrize("case, gating", [("switch", "switch_gating"), ("experts_first", "top_2_gating")])
def test_losses_and_the_next_step_of_mesh_tensorflow(case, gating, golden):
    folder, model, source, numbers = golden(f"mesh_tensorflow/{case}")
    measured, weights = take_step(source, folder, model, mesh_features(numbers))
    config = model.config
    assert float(measured.loss.value) == pytest.approx(float(numbers["loss"]), abs=1e-5)
    for i, stats in enumerate(measured.batch.routers.values()):
        loss = (config.load_balancing_loss_weight * stats.load_balancing_loss.value
                + config.router_z_loss_weight * stats.router_z_loss.value)
        assert float(loss) == pytest.approx(float(numbers[f"router/{i}"]), abs=1e-6)
    for name, (before, after) in weights.items():
        expected = numbers[f"next/{name_in_mesh_tensorflow(name).format(gating=gating)}"].reshape(after.shape)
        if "/experts/" in name:
            # Theirs are scaled and clipped by the mean squares over all experts, ours of each.
            for mine, theirs in zip(after - before, expected - before, strict=True):
                scale = np.abs(theirs).max() / np.abs(mine).max()
                np.testing.assert_allclose(scale * mine, theirs, rtol=0, atol=1e-5, err_msg=name)
        else:
            np.testing.assert_allclose(after, expected, rtol=0, atol=1e-5, err_msg=name)
