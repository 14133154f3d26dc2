import dataclasses
import functools

import pytest

from switch_tf.configs.choices import ACTIVATIONS, GATED_ACTIVATIONS
from switch_tf.configs.switch_config import SwitchConfig
from switch_tf.conversion import huggingface_config
from switch_tf.conversion.huggingface_config import Structure, sparse_layers
from tests.conversion.shared import refusal

SWITCH_JSON = {
    "model_type": "switch_transformers", "vocab_size": 64, "d_model": 16, "d_ff": 24, "d_kv": 4, "num_heads": 3,
    "num_layers": 4, "num_decoder_layers": 4, "num_experts": 2, "num_sparse_encoder_layers": 2,
    "num_sparse_decoder_layers": 2, "expert_capacity": 5, "router_jitter_noise": 0.02, "router_dtype": "bfloat16",
    "router_aux_loss_coef": 0.5, "router_z_loss_coef": 0.25, "dropout_rate": 0.3, "layer_norm_epsilon": 1e-5,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 20}
T5_JSON = {"model_type": "t5", "num_layers": 4, "num_decoder_layers": 4}


def structure(num_layers=4, decoder_layers=None, sparse=(), decoder_sparse=None, **facts):
    """What a checkpoint shows in which every layer has a feed-forward layer."""
    counts = {"encoder": num_layers, "decoder": num_layers if decoder_layers is None else decoder_layers}
    experts = {"encoder": set(sparse), "decoder": set(sparse if decoder_sparse is None else decoder_sparse)}
    return Structure(counts, experts, {stack: set(range(counts[stack])) - experts[stack] for stack in counts},
                     **{"is_gated": False, "has_logits": False, "has_t5x_logits": False, **facts})


def convert(values, shown, **changes):
    return huggingface_config.from_hugging_face({**values, **changes}, shown)


refused = functools.partial(refusal, convert)


def test_every_number_of_a_switch_transformer():
    config = convert(SWITCH_JSON, structure(sparse=(1, 3)))
    assert config == SwitchConfig(
        vocab_size=64, d_model=16, d_ff=24, d_kv=4, num_heads=3, num_encoder_layers=4, num_decoder_layers=4,
        num_experts=2, encoder_sparse_step=2, decoder_sparse_step=2, expert_capacity=5, jitter_noise=0.02,
        router_dtype="bfloat16", load_balancing_loss_weight=0.5, router_z_loss_weight=0.25, dropout_rate=0.3,
        expert_dropout_rate=0.3, layer_norm_epsilon=1e-5, relative_attention_num_buckets=8,
        relative_attention_max_distance=20, semantics="hf", scale_decoder_outputs=True)


def test_what_is_missing_is_what_transformers_takes():
    config = convert({"model_type": "t5"}, structure(6))
    assert config == SwitchConfig(scale_decoder_outputs=True)  # T5 Small
    config = convert({"model_type": "switch_transformers", "num_decoder_layers": None}, structure(12, sparse=(1, 5, 9)))
    assert (config.d_model, config.d_ff, config.num_heads, config.num_experts) == (768, 2048, 12, 8)
    assert (config.num_decoder_layers, config.expert_capacity, config.encoder_sparse_step) == (12, 64, 4)
    config = convert({"model_type": "mt5"}, structure(8, is_gated=True, has_logits=True))
    assert (config.vocab_size, config.num_heads, config.activation, config.scales_logits) == (250112, 6, "geglu", False)


@pytest.mark.parametrize("values, is_scaled", [
    ({}, True), ({"tie_word_embeddings": True}, True), ({"tie_word_embeddings": False}, False),
    ({"tie_word_embeddings": True, "scale_decoder_outputs": False}, False),
    ({"tie_word_embeddings": False, "scale_decoder_outputs": True}, True)])
@pytest.mark.parametrize("has_logits", [True, False])
def test_tying_is_decided_by_tensors_and_scaling_by_the_configuration(values, is_scaled, has_logits):
    config = convert(T5_JSON, structure(has_logits=has_logits), **values)
    assert (config.logits_via_embedding, config.scales_logits) == (not has_logits, is_scaled)


@pytest.mark.parametrize("values, activation", [
    ({}, "relu"), ({"feed_forward_proj": "gated-gelu"}, "geglu"), ({"feed_forward_proj": "gated-gelu_new"}, "geglu"),
    ({"feed_forward_proj": "gated-gelu", "dense_act_fn": "gelu_new", "is_gated_act": True}, "geglu"),
    ({"feed_forward_proj": "gated-gelu", "dense_act_fn": "gelu"}, "geglu_exact"),
    ({"feed_forward_proj": "gelu"}, "gelu"), ({"feed_forward_proj": "relu", "dense_act_fn": "gelu"}, "gelu"),
    ({"feed_forward_proj": "gelu_new"}, "gelu_tanh"), ({"feed_forward_proj": "silu"}, "silu"),
    ({"feed_forward_proj": "gated-silu"}, "swiglu"), ({"feed_forward_proj": "gated-swish"}, "swiglu"),
    ({"feed_forward_proj": "gated-relu"}, "reglu"),
    *(({"experts": True, "dense_act_fn": stated}, activation) for stated, activation in (
        ("relu", "relu"), ("gelu", "gelu"), ("gelu_new", "gelu_tanh"), ("silu", "silu")))])
def test_activations(values, activation):
    described = SWITCH_JSON if values.pop("experts", False) else T5_JSON
    shown = structure(sparse=(1, 3) if described is SWITCH_JSON else (), is_gated=activation in GATED_ACTIVATIONS)
    assert convert(described, shown, **values).activation == activation


@pytest.mark.parametrize("values", [
    {"feed_forward_proj": "gated-tanh"}, {"feed_forward_proj": "gated-gelu-new"}, {"feed_forward_proj": "wide-gelu"},
    {"feed_forward_proj": []}, {"feed_forward_proj": "-relu"},
    {"feed_forward_proj": "gated-gelu", "dense_act_fn": "mish"}, {"model_type": "switch_transformers",
                                                                  "dense_act_fn": "mish"}])
def test_other_activations_are_refused(values):
    key, stated = list(values.items())[-1]
    assert refused(T5_JSON, structure(is_gated="model_type" not in values), **values).startswith(
        f"{key} in config.json is {stated!r}, and switch_tf has the activations 'relu', 'gelu'")


def test_the_gaps_of_byt5_are_said():
    with pytest.warns(UserWarning, match="This is a ByT5, whose gaps are the ids 258, 257, 256, ...: the last bytes"):
        config = convert(T5_JSON, structure(), tokenizer_class="ByT5Tokenizer")
    assert config == convert(T5_JSON, structure())


def test_switch_xxl():
    # Released with gated experts and T5X's logits, both of which transformers does not know.
    shown = structure(sparse=(1, 3), is_gated=True, has_logits=True, has_t5x_logits=True)
    with pytest.warns(UserWarning) as warned:
        config = convert(SWITCH_JSON, shown)
    assert (config.activation, config.logits_via_embedding, config.scales_logits) == ("geglu", False, False)
    assert [str(warning.message).split(":")[0] for warning in warned] == [
        "config.json says dense_act_fn='relu', but the feed-forward layers hold wi_0 and wi_1",
        "The checkpoint's logits are 'decoder.logits_dense.weight', a name that transformers does not know"]


def test_switch_c():
    # Released with 15 layers of experts in each stack, and a config.json that says 12 in the decoder, with step 0.
    stated = {"num_layers": 15, "num_decoder_layers": 12, "num_sparse_encoder_layers": 15,
              "num_sparse_decoder_layers": 15, "encoder_sparse_step": 1, "decoder_sparse_step": 0}
    with pytest.warns(UserWarning) as warned:
        config = convert(SWITCH_JSON, structure(15, sparse=range(15)), **stated)
    assert config.num_decoder_layers == 15
    assert config.encoder_sparse_layers == config.decoder_sparse_layers == tuple(range(15))
    assert [str(warning.message) for warning in warned] == [
        "config.json says num_decoder_layers=12, but the checkpoint holds 15 decoder layers: all are read.",
        "config.json says decoder_sparse_step=0, but the checkpoint holds experts in the decoder layers "
        f"{list(range(15))}: they are read with decoder_sparse_step=1."]


def test_a_layer_without_any_feed_forward_layer_is_left_to_the_configuration():
    shown = structure(sparse=(1,))
    shown.dense_layers["encoder"].discard(3)
    shown.dense_layers["decoder"].discard(3)
    assert convert(SWITCH_JSON, shown).encoder_sparse_layers == (1, 3)


@pytest.mark.parametrize("values", [
    {"architectures": ["T5EncoderModel"]}, {"is_encoder_decoder": False}, {"num_decoder_layers": 0}])
def test_encoders(values):
    config = convert(T5_JSON, structure(4, decoder_layers=0), **values)
    assert (config.num_encoder_layers, config.num_decoder_layers) == (4, 0)
    # T5EncoderModel reads the encoder of a whole checkpoint, which is more than switch_tf may leave out unasked.
    assert convert(T5_JSON, structure(4), architectures=["T5EncoderModel"]).num_decoder_layers == 4


OTHER_TYPE = "model_type in config.json must be one of 't5', 'mt5', 'umt5', 'switch_transformers', not "


@pytest.mark.parametrize("values, shown, changes, message", [
    (T5_JSON, {"is_gated": True}, {}, "feed_forward_proj='relu', but the feed-forward layers hold wi_0 and wi_1"),
    (T5_JSON, {}, {"feed_forward_proj": "gated-gelu"}, "'gated-gelu', but the feed-forward layers hold wi;"),
    (SWITCH_JSON, {"sparse": (1, 3)}, {"dense_act_fn": "gated-gelu"},
     "'gated-gelu', but the feed-forward layers hold wi;"),
    (T5_JSON, {"decoder_layers": 0}, {"architectures": ["T5ForConditionalGeneration"]},
     "the checkpoint's decoder ends after 0 layers; it is incomplete"),
    (T5_JSON, {"decoder_layers": 3}, {},
     "config.json says num_decoder_layers=4, but the checkpoint's decoder ends after 3 layers; it is incomplete"),
    (SWITCH_JSON, {"sparse": (2, 3)}, {},
     "The checkpoint's encoder holds experts in the layers [2, 3] of 4, which no sparse step describes"),
    (T5_JSON, {}, {"model_type": "longt5"},
     OTHER_TYPE + "'longt5': LongT5 has local and transient-global attention"),
    (T5_JSON, {}, {"model_type": "bert"}, OTHER_TYPE + "'bert': other architectures"),
    (SWITCH_JSON, {}, {"router_bias": True}, "router_bias in config.json must be false"),
    (T5_JSON, {}, {"num_layers": "4"}, "num_layers in config.json must be an integer of at least 0, not '4'"),
    (SWITCH_JSON, {"sparse": (1, 3)}, {"expert_capacity": 0}, "expert_capacity must be an integer of at least 1, not "
     "0"),
    (SWITCH_JSON, {"sparse": (1, 3)}, {"router_dtype": "float16"}, "router_dtype must be one of")])
def test_other_configurations_are_refused(values, shown, changes, message):
    assert message in refused(values, structure(**shown), **changes)


# To Hugging Face.

DENSE = SwitchConfig(num_encoder_layers=4, num_decoder_layers=4)
SPARSE = dataclasses.replace(DENSE, num_experts=8, expert_dropout_rate=0.1)


@pytest.mark.parametrize("changes", [
    {}, {"activation": "geglu", "logits_via_embedding": False}, {"scale_decoder_outputs": False}, {"num_heads": 3},
    *({"activation": activation} for activation in ACTIVATIONS)])
def test_dense_there_and_back(changes):
    config = dataclasses.replace(DENSE, **changes)
    shown = structure(is_gated=config.activation in GATED_ACTIVATIONS, has_logits=not config.logits_via_embedding)
    again = convert(huggingface_config.to_hugging_face(config, None), shown)
    assert again == dataclasses.replace(config, scale_decoder_outputs=config.scales_logits)


def test_a_list_that_a_step_describes_can_be_written():
    config = dataclasses.replace(SPARSE, num_encoder_layers=4, encoder_sparse_indices=(1, 3), expert_d_ff=SPARSE.d_ff)
    assert huggingface_config.to_hugging_face(config, 7)["encoder_sparse_step"] == 2


@pytest.mark.parametrize("num_layers, steps", [(4, (2, 2)), (4, (1, 0)), (5, (0, 2)), (3, (2, 2)), (1, (1, 1))])
def test_sparse_there_and_back(num_layers, steps):
    config = dataclasses.replace(SPARSE, num_encoder_layers=num_layers, num_decoder_layers=num_layers,
                                 encoder_sparse_step=steps[0], decoder_sparse_step=steps[1])
    values = huggingface_config.to_hugging_face(config, 7)
    encoder, decoder = config.encoder_sparse_layers, config.decoder_sparse_layers
    assert sparse_layers(num_layers, values["encoder_sparse_step"]) == encoder
    assert (values["num_sparse_encoder_layers"], values["num_sparse_decoder_layers"]) == (len(encoder), len(decoder))
    again = convert(values, structure(num_layers, sparse=encoder, decoder_sparse=decoder))
    assert (again.encoder_sparse_layers, again.decoder_sparse_layers) == (encoder, decoder)
    assert (again.semantics, again.expert_capacity) == ("hf", 7)


@pytest.mark.parametrize("config, capacity, changes, message", [
    (SPARSE, None, {},
     "a fixed number of slots for each sequence, padding included, instead of a capacity factor (here 2.0 for "
     "groups of 4096 tokens): other tokens would be dropped; choose that number with expert_capacity=..."),
    (SPARSE, 0, {}, "expert_capacity must be an integer of at least 1, not 0"),
    (DENSE, 3, {}, "expert_capacity=3 belongs to a model with experts"),
    (DENSE, None, {"num_decoder_layers": 0, "logits_via_embedding": False},
     "encoders have no logits, but this one has weights of its own"),
    (SPARSE, 4, {"activation": "geglu"},
     "has no gated experts (its 'gated-gelu' raises KeyError), but activation is 'geglu'"),
    (SPARSE, 4, {"num_encoder_layers": 8, "encoder_sparse_step": 4},
     "1 + 2 step, ..., or in all, but the encoder of this model in [3, 7] of 8"),
    (SPARSE, 4, {"num_encoder_layers": 8, "encoder_sparse_indices": (0, 1)},
     "1 + 2 step, ..., or in all, but the encoder of this model in [0, 1] of 8"),
    (SPARSE, 4, {"expert_d_ff": 7}, f"knows expert_d_ff={SPARSE.d_ff} only, but it is 7")])
def test_what_they_cannot_represent(config, capacity, changes, message):
    assert message in refusal(huggingface_config.to_hugging_face, dataclasses.replace(config, **changes), capacity)


def test_hf_semantics_bring_their_capacity():
    config = dataclasses.replace(SPARSE, semantics="hf", expert_capacity=5)
    assert huggingface_config.to_hugging_face(config, None)["expert_capacity"] == 5
    assert huggingface_config.to_hugging_face(config, 6)["expert_capacity"] == 6


def test_one_dropout_rate_is_said():
    with pytest.warns(UserWarning, match="dropout_rate=0.1 is written for the experts too, whose expert_dropout_rate="
                                         "0.4 is not"):
        written = huggingface_config.to_hugging_face(dataclasses.replace(SPARSE, expert_dropout_rate=0.4), 4)
    assert written["dropout_rate"] == 0.1
