"""Every public constructor and function, given wrong values: a sentence or success, never a traceback or NaN."""

import contextlib
import dataclasses
import functools
import inspect
import linecache
import pathlib
import tempfile
from fractions import Fraction
from types import SimpleNamespace

import keras
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import switch_tf
from switch_tf import (
    Experiment,
    SwitchConfig,
    SwitchTransformer,
    configs,
    conversion,
    data,
    layers,
    losses,
    partitioning,
)
from switch_tf.comparison import Comparison
from switch_tf.configs import policies
from switch_tf.configs.choices import ACTIVATIONS
from switch_tf.configs.run import Run, StepSettings
from switch_tf.metrics import Mean
from switch_tf.optim.adafactor import Adafactor
from switch_tf.optim.schedules import RsqrtDecay
from switch_tf.refusals import Refusal

PACKAGE = pathlib.Path(switch_tf.__file__).parent
NAN, INF = float("nan"), float("inf")

# What people put where it does not belong.
VALUES = st.one_of(
    st.sampled_from([
        None, True, False, np.True_, "", "yes", "8", "auto", "switch", b"x", -1, 0, 1, 2, 3, 2**31, 10**400, -0.0, 0.5,
        1.0, -0.1, 1.5, NAN, INF, -INF, 1e-300, 1e300, np.int64(2), np.uint8(3), np.float32(0.5), np.float32(NAN),
        np.float16(2), np.array(2), np.array([1, 2]), Fraction(1, 2), 1j, [], [2], (2, 3), {}, {"a": 1}, object, print,
    ]),
    st.integers(-3, 6), st.floats(), st.text(max_size=4))

X = np.random.RandomState(0).randn(2, 4, 6).astype("float32")
IDS = np.array([[3, 1, 0, 0], [2, 5, 4, 0]], "int32")
# Tensors of which most have another kind, rank or shape than what they are given for.
TENSORS = st.sampled_from([
    None, X, X[0], X[None], X[:, :, :5], X[:1], X.astype("float64"), X > 0, X.astype("int32"), IDS, IDS.T, IDS[0],
    IDS > 0, (IDS > 0).T, (IDS > 0)[..., None], IDS + 100, IDS - 5, IDS * 0.5, np.zeros((0, 4, 6), "float32"),
    np.zeros((2, 1, 4, 4), bool), np.ones((1, 2, 4, 4), "float32"), np.array("text"), np.float32(0.5)])
NEVER_NONE = TENSORS.filter(lambda value: value is not None)  # the first argument: Keras says so itself
WORDS = {name: st.one_of(VALUES, st.sampled_from(choices)) for name, choices in {
    "policy": policies.names(), "router": policies.names(), "routing_policy": policies.names(),
    "decoder_routing_policy": policies.names(), "activation": ACTIVATIONS, "semantics": ("mtf", "t5x", "hf"),
    "dispatch": ("einsum", "index", "ragged"), "exploration": ("argmax", "sample"),
    "second_expert_policy": ("all", "none")}.items()}


def layer_call(make, inputs, arguments):
    """Makes a layer of the arguments that its constructor knows and calls it with the others."""
    known = inspect.signature(make.__init__).parameters
    layer = make(**{name: value for name, value in arguments.items() if name in known})
    return layer(inputs, **{name: value for name, value in arguments.items() if name not in known})


def layer(make, *tensors, **valid):
    """`(function, valid arguments, names of tensors)` of a layer and its call."""
    def call(inputs, **arguments):
        return layer_call(make, inputs, arguments)

    known = {name: parameter.default for name, parameter in inspect.signature(make.__init__).parameters.items()
             if name not in ("self", "kwargs")}
    extra = dict.fromkeys(tensors) | {
        name: default for name, default in (("training", False), ("return_router_stats", False))
        if name in inspect.signature(make.call).parameters}
    return call, {"inputs": X, **known, **extra, **valid}, ("inputs", *tensors)


def switch_attention(**arguments):
    experts = {name: layers.SwitchFeedForward(2, 3, output_dim=4, name=name)
               for name in ("query_experts", "key_value_experts")}
    return layers.SwitchSelfAttention(**{**experts, **arguments})


@functools.cache
def tiny_model():
    model = SwitchTransformer(SwitchConfig(
        vocab_size=8, d_model=4, d_ff=4, d_kv=2, num_heads=2, num_encoder_layers=1, num_decoder_layers=1, num_experts=2,
        encoder_sparse_step=1, decoder_sparse_step=1))
    model.build()
    return model


def model_call(training, return_router_stats, **features):
    return tiny_model()({name: value for name, value in features.items() if value is not None}, training=training,
                        return_router_stats=return_router_stats)


def router_loss(load_balancing_loss_weight, router_z_loss_weight):
    mean = Mean(keras.ops.ones([]), keras.ops.ones([]))
    return losses.router_loss(SimpleNamespace(load_balancing_loss=mean, router_z_loss=mean), load_balancing_loss_weight,
                              router_z_loss_weight)


def layout(**arguments):
    made = partitioning.Layout(**arguments)
    return made.resolve(4, "CPU"), made.spec(("batch", "embed"), at_rest=True)


def config_costs(inputs_length, targets_length, **fields):
    config = SwitchConfig(**fields)
    return config.num_parameters, config.flops_per_sequence(inputs_length, targets_length), config.sparse_layer_names


@contextlib.contextmanager
def registered_policies():
    saved = dict(policies._policies)
    try:
        yield
    finally:
        policies._policies.clear()
        policies._policies.update(saved)


def registered(policy):
    with registered_policies():
        policies.register(policy)


def registered_vocabulary(name, make):
    data.register_vocabulary(name, make)
    configs.names.vocabularies().pop(name)


def to_hugging_face(model, folder, expert_capacity):
    with tempfile.TemporaryDirectory() as temporary, contextlib.chdir(temporary):
        folder = "model" if isinstance(folder, str) and not folder else folder
        conversion.to_hugging_face(hugging_face_model() if isinstance(model, SimpleNamespace) else model, folder,
                                   expert_capacity)


def to_switch_tf(model, folder):
    with tempfile.TemporaryDirectory() as temporary, contextlib.chdir(temporary):
        conversion.to_switch_tf(hugging_face_model() if isinstance(model, SimpleNamespace) else model,
                                "model" if isinstance(folder, str) and not folder else folder)


@functools.cache
def hugging_face_model():
    return SwitchTransformer(dataclasses.replace(tiny_model().config, semantics="hf", expert_capacity=3))


def fields_of(record, **valid):
    return {**{name: parameter.default for name, parameter in inspect.signature(record).parameters.items()}, **valid}


SCORES = np.random.RandomState(1).randn(2, 4, 3).astype("float32")
LENGTHS = {"inputs": 8, "targets": 4}
# Name -> (function, valid arguments, names of those that are tensors).
PUBLIC = {
    "Experiment": (Experiment, fields_of(
        Experiment, config=SwitchConfig(), layout=partitioning.Layout(), settings=StepSettings(),
        run=Run("runs", "task", {"inputs": 8, "targets": 4}, train_steps=2, batch_size=2)), ()),
    "SwitchConfig": (config_costs, fields_of(SwitchConfig, inputs_length=16, targets_length=8), ()),
    "SwitchConfig.from_preset": (SwitchConfig.from_preset, {"name": "switch_tiny"}, ()),
    "SwitchTransformer": (SwitchTransformer, {"config": {"vocab_size": 8}}, ()),
    "SwitchTransformer.call": (
        model_call, {"encoder_input_tokens": IDS, "decoder_input_tokens": IDS, "encoder_segment_ids": None,
                     "decoder_target_tokens": None, "training": False, "return_router_stats": False},
        ("encoder_input_tokens", "decoder_input_tokens", "encoder_segment_ids", "decoder_target_tokens")),
    "layers.Dropout": layer(layers.Dropout, rate=0.1),
    "layers.ExpertFeedForward": layer(layers.ExpertFeedForward, inputs=np.ones((2, 1, 3, 4), "float32"), num_experts=2,
                                      d_ff=3),
    "layers.FeedForward": layer(layers.FeedForward, d_ff=3),
    "layers.LogitsDense": layer(layers.LogitsDense, vocab_size=5),
    "layers.MultiHeadAttention": layer(layers.MultiHeadAttention, "inputs_kv", "attention_mask", "position_bias",
                                       num_heads=2, d_kv=2),
    "layers.RMSNorm": layer(layers.RMSNorm),
    "layers.RelativePositionBias": (
        lambda query_length, key_length, **arguments: layers.RelativePositionBias(**arguments)(
            query_length=query_length, key_length=key_length),
        {"num_heads": 2, "num_buckets": 8, "max_distance": 16, "is_bidirectional": True, "query_length": 3,
         "key_length": 4}, ()),
    "layers.Router": layer(layers.Router, "padding_mask", "token_ids", "is_present", num_experts=3, expert_capacity=2),
    "layers.SwitchFeedForward": layer(layers.SwitchFeedForward, "padding_mask", "token_ids", num_experts=2, d_ff=3),
    "layers.SwitchSelfAttention": (
        lambda inputs, padding_mask, attention_mask, training, **arguments: switch_attention(**arguments)(
            inputs, padding_mask=padding_mask, attention_mask=attention_mask, training=training),
        {"inputs": X, "padding_mask": None, "attention_mask": None, "training": False, "num_heads": 2, "d_kv": 2,
         "dropout_rate": 0.0, "init_scale": 1.0, "query_experts": None, "key_value_experts": None},
        ("inputs", "padding_mask", "attention_mask")),
    "layers.TokenEmbedding": layer(layers.TokenEmbedding, inputs=IDS, vocab_size=6, d_model=3),
    "losses.cross_entropy": (losses.cross_entropy, {
        "logits": SCORES, "targets": IDS % 3, "loss_weights": IDS > 0, "z_loss_weight": 1e-4, "label_smoothing": 0.0},
        ("logits", "targets", "loss_weights")),
    "losses.soft_cross_entropy": (losses.soft_cross_entropy, {
        "logits": SCORES, "teacher_logits": SCORES, "loss_weights": IDS > 0, "temperature": 2.0},
        ("logits", "teacher_logits", "loss_weights")),
    "losses.most_probable": (losses.most_probable, {
        "teacher_logits": SCORES, "num_tokens": 2, "temperature": 2.0}, ("teacher_logits",)),
    "losses.coarse_soft_cross_entropy": (lambda token_ids, log_probs, log_rest, **arguments:
        losses.coarse_soft_cross_entropy(predictions=losses.Predictions(token_ids, log_probs, log_rest), **arguments), {
            "logits": SCORES, "token_ids": np.stack([IDS % 3, (IDS + 1) % 3], -1), "log_probs": X[..., :2],
            "log_rest": X[..., 0], "loss_weights": IDS > 0, "temperature": 2.0},
        ("logits", "token_ids", "log_probs", "log_rest", "loss_weights")),
    "losses.load_balancing_loss": (losses.load_balancing_loss, {
        "router_probs": SCORES, "expert_index": IDS % 3, "padding_mask": None, "semantics": "switch_tf"},
        ("router_probs", "expert_index", "padding_mask")),
    "losses.balance": (lambda **arguments: losses.balance(**arguments).mean, {
        "router_probs": SCORES, "expert_index": np.stack([IDS % 3, (IDS + 1) % 3], -1), "padding_mask": None,
        "semantics": "switch_tf", "second_place_weight": 0.5}, ("router_probs", "expert_index", "padding_mask")),
    "losses.router_z_loss": (losses.router_z_loss, {"router_logits": SCORES, "padding_mask": None},
                             ("router_logits", "padding_mask")),
    "losses.router_loss": (router_loss, {"load_balancing_loss_weight": 0.1, "router_z_loss_weight": 0.1}, ()),
    "optim.Adafactor": (lambda **arguments: Adafactor(**arguments).get_config(), {
        "learning_rate": 1e-3, "decay_exponent": 0.8, "epsilon": 1e-30, "clip_threshold": 1.0,
        "scales_by_parameter": True, "minimum_scale": 1e-3}, ()),
    "optim.RsqrtDecay": (lambda **arguments: RsqrtDecay(**arguments)(5), {"base": 1.0, "warmup_steps": 10}, ()),
    "partitioning.Layout": (layout, fields_of(partitioning.Layout, rules=(("batch", "data"),)), ()),
    "policies.Policy": (policies.Policy, fields_of(policies.Policy, name="mine", decide=print), ()),
    "policies.TopN": (policies.TopN, fields_of(policies.TopN), ()),
    "policies.Top2": (policies.Top2, fields_of(policies.Top2), ()),
    "policies.get": (policies.get, {"name": "switch"}, ()),
    "policies.register": (registered, {"policy": policies.Policy("mine", print)}, ()),
    "training.Run": (Run, fields_of(Run, model_dir="runs", mixture_or_task_name="task", task_feature_lengths=LENGTHS,
                                    train_steps=2, batch_size=2), ()),
    "comparison.Comparison": (Comparison, fields_of(Comparison, model_dir="runs", variants={"a": [], "b": []}), ()),
    "training.StepSettings": (StepSettings, fields_of(StepSettings), ()),
    "data.DatasetDescription": (data.DatasetDescription, fields_of(
        data.DatasetDescription, mixture_or_task_name="task", task_feature_lengths=LENGTHS, batch_size=2), ()),
    "data.check_task": (data.check_task, {"name": "task"}, ()),
    "data.reading_of": (data.reading_of, {"mixture_or_task_name": "task"}, ()),
    "data.target_vocabulary": (data.target_vocabulary, {"mixture_or_task_name": "task"}, ()),
    "data.typed_sentinels": (data.typed_sentinels, {"meaning": "gaps"}, ()),
    "data.vocabulary_size": (data.vocabulary_size, {"mixture_or_task_name": "task"}, ()),
    "data.check_vocabulary": (data.check_vocabulary, {"mixture_or_task_name": "task", "vocab_size": 8}, ()),
    "data.get_dataset": (data.get_dataset, {"description": None}, ()),
    "data.check_examples": (data.check_examples, {"description": None}, ()),
    "data.examples": (data.examples, {"description": None, "count": 1}, ()),
    "data.describe": (data.describe, {"name": "task"}, ()),
    "data.get_batches": (data.get_batches, {"description": None, "steps_per_call": 1}, ()),
    "data.fingerprint": (data.fingerprint, {"description": None}, ()),
    "data.plan_cache": (data.plan_cache, {
        "mixture_or_task_name": "task", "split": "train", "vocabulary": None, "cache_dir": None, "num_shards": 1,
        "overwrite": False}, ()),
    "data.vocabulary_fingerprint": (data.vocabulary_fingerprint, {"mixture_or_task_name": "task"}, ()),
    "data.pieces_fingerprint": (data.pieces_fingerprint, {"mixture_or_task_name": "task"}, ()),
    "data.get_vocabulary": (data.get_vocabulary, {"name": "no-such.model"}, ()),
    "data.register_vocabulary": (registered_vocabulary, {"name": "own", "make": print}, ()),
    "data.find_files": (data.find_files, {"name": "FILES", "patterns": "no-such.txt"}, ()),
    "data.TextFile": (data.TextFile, {"name": "no-such.txt", "fields": ["text"]}, ()),
    "data.Evaluator": (data.Evaluator, {"description": None, "num_examples": 1}, ()),
    **{f"data.{name}": (getattr(data, name), {"mixture_or_task_name": "task", "split": "validation"}, ())
       for name in ("has_metrics", "declares_directions", "names_of_tasks")},
    "conversion.from_mesh_tensorflow": (
        conversion.from_mesh_tensorflow, {"folder": "no-such-folder", "config": None}, ()),
    "conversion.from_switch_tf": (conversion.from_switch_tf, {"source": "no-such-folder"}, ()),
    "conversion.to_switch_tf": (to_switch_tf, {"model": SimpleNamespace(config=None), "folder": ""}, ()),
    "conversion.from_t5x": (conversion.from_t5x, {"folder": "no-such-folder", "config": None}, ()),
    "conversion.from_hugging_face": (conversion.from_hugging_face, {"folder": "no-such-folder"}, ()),
    "conversion.to_hugging_face": (
        to_hugging_face, {"model": SimpleNamespace(config=None), "folder": "", "expert_capacity": 3}, ()),
}  # fmt: skip


def is_sentence(error) -> bool:
    """Whether one of our own `raise` statements made this error, of one line that ends as a sentence does."""
    place = error.__traceback__
    while place.tb_next is not None:
        place = place.tb_next
    file = place.tb_frame.f_code.co_filename
    line = linecache.getline(file, place.tb_lineno).strip()
    text = str(error)
    return (pathlib.Path(file).is_relative_to(PACKAGE) and line.startswith("raise ") and "\n" not in text
            and len(text) > 20 and (text[-1] in ".?" or ": hf download" in text))


def all_finite(result) -> bool:
    """Whether no number in a nest of tensors and numbers is NaN or infinite."""
    leaves = [np.asarray(leaf) for leaf in keras.tree.flatten(result)
              if keras.ops.is_tensor(leaf) or isinstance(leaf, int | float | np.ndarray)]
    return all(np.isfinite(leaf.astype("float64")).all() for leaf in leaves if leaf.dtype.kind in "fiub")


# Public, and not tried: they belong to whoever writes a layer, or are reached through those that are tried.
UNTRIED = {
    "losses.router_z_mean", "losses.Balance", "losses.Predictions",
    "policies.names", "policies.RouterWeight", "policies.imported", "policies.check_options", "policies.resolve",
    "data.keep_jax_on_cpu", "data.AddedFeatures", "data.names", "data.BadData", "data.NUM_SENTINELS", "data.bad_row",
    "data.refusing_bad_rows", "data.TaskScores", "data.average", "data.write_records", "data.Batches", "data.Shard",
    "data.is_complete", "data.write_shard", "data.finish_cache", "data.SpellingOps", "data.description_of_data",
    "data.passes",  # of the author of a source
    "data.examples_of_lines", "data.kind_of",  # of a file that a command looked for
    # These take a vocabulary, which is no value of the user's.
    "data.pieces", "data.read_text", "data.spell", "data.spellings", "data.Reading",
    *(f"partitioning.{name}" for name in partitioning.__all__ if name != "Layout")}


def test_no_public_constructor_or_function_is_left_out():
    names = {f"layers.{name}" for name in layers.__all__}
    names |= {f"data.{name}" for name, member in vars(data).items()
              if not name.startswith("_") and not inspect.ismodule(member)}
    names |= {f"conversion.{name}" for name in conversion.__all__}
    names |= {name for name in switch_tf.__all__ if name[0].isupper()}
    names |= {f"partitioning.{name}" for name in partitioning.__all__}
    for module in (losses, policies):
        short = module.__name__.rpartition(".")[2]
        names |= {f"{short}.{name}" for name, member in inspect.getmembers(module, callable)
                  if member.__module__ == module.__name__ and not name.startswith("_")}
    assert names - UNTRIED <= set(PUBLIC)
    assert not UNTRIED & set(PUBLIC)


def try_wrong_values(name, max_examples):
    function, valid, tensors = PUBLIC[name]
    tried = {"values": 0, "refused": 0}

    @settings(max_examples=max_examples, deadline=None, database=None, derandomize=True,
              suppress_health_check=list(HealthCheck))
    @given(st.data())
    def one_call(draws):
        wrong = draws.draw(st.lists(st.sampled_from(sorted(valid)), min_size=1, max_size=2, unique=True))
        first = next(iter(valid))
        changed = {argument: draws.draw(
            (NEVER_NONE if argument == first else TENSORS) if argument in tensors else WORDS.get(argument, VALUES),
            label=argument) for argument in wrong}
        tried["values"] += len(changed)
        try:
            result = function(**{**valid, **changed})
        except Refusal as error:
            tried["refused"] += 1
            if not is_sentence(error):
                raise
        else:
            assert all_finite(result), changed

    one_call()
    print(f"{name}: {tried['values']} values, {tried['refused']} calls refused")  # pytest -s shows it
    return tried["refused"]


@pytest.mark.parametrize("name", PUBLIC)
def test_wrong_values_are_refused_in_a_sentence_or_work(name):
    assert try_wrong_values(name, max_examples=20) > 10  # of values that are wrong, most are refused


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", PUBLIC)
def test_many_more_wrong_values_are_refused_in_a_sentence_or_work(name):
    assert try_wrong_values(name, max_examples=300) > 150  # of values that are wrong, most are refused
