import dataclasses
import json
import re

import numpy as np
import pytest

from switch_tf.configs.switch_config import SwitchConfig


def test_sparse_layers_are_the_last_of_each_step():
    layers = SwitchConfig(num_encoder_layers=12, num_decoder_layers=3, num_experts=2, encoder_sparse_step=4,
                          decoder_sparse_step=1)
    assert layers.encoder_sparse_layers == (3, 7, 11)
    assert layers.decoder_sparse_layers == (0, 1, 2)
    assert layers.sparse_layer_names == ("encoder/layers_3", "encoder/layers_7", "encoder/layers_11",
                                         "decoder/layers_0", "decoder/layers_1", "decoder/layers_2")


def test_hugging_face_semantics_count_sparse_layers_from_layer_1():
    layers = SwitchConfig(num_encoder_layers=12, num_experts=2, encoder_sparse_step=4, decoder_sparse_step=0,
                          semantics="hf", expert_capacity=64)
    assert layers.encoder_sparse_layers == (1, 5, 9)
    assert layers.decoder_sparse_layers == ()


def test_sparse_layers_may_be_listed():
    layers = SwitchConfig(num_encoder_layers=4, num_decoder_layers=3, num_experts=2, encoder_sparse_indices=[1, 2],
                          decoder_sparse_indices=(np.int64(2),))
    assert (layers.encoder_sparse_layers, layers.decoder_sparse_layers) == ((1, 2), (2,))
    assert layers.sparse_layer_names == ("encoder/layers_1", "encoder/layers_2", "decoder/layers_2")
    assert SwitchConfig(**json.loads(json.dumps(dataclasses.asdict(layers)))) == layers
    assert dataclasses.replace(layers, encoder_sparse_indices=()).sparse_layer_names == ("decoder/layers_2",)
    # A decoder without experts may have any policy, and a dense model no sparse layers.
    assert not dataclasses.replace(layers, routing_policy="top2", decoder_sparse_indices=()).decoder_sparse_layers
    assert not dataclasses.replace(layers, num_experts=0).sparse_layer_names


@pytest.mark.parametrize(("changes", "message"), [
    ({"encoder_sparse_indices": 3}, "encoder_sparse_indices must be a tuple of the indices of layers, not 3"),
    ({"encoder_sparse_indices": (1, 6)}, "must list different layers from 0 to 5 in ascending order, not (1, 6)"),
    ({"encoder_sparse_indices": (2, 1)}, "must list different layers from 0 to 5 in ascending order, not (2, 1)"),
    ({"decoder_sparse_indices": (1, 1)}, "must list different layers from 0 to 5 in ascending order, not (1, 1)"),
    ({"decoder_sparse_indices": (0.5,)}, "Each index of decoder_sparse_indices must be an integer of at least 0"),
    ({"expert_d_ff": 0}, "expert_d_ff must be an integer of at least 1, not 0"),
])
def test_lists_of_layers_and_widths_that_do_not_exist_are_refused(changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        SwitchConfig(num_experts=2, **changes)


@pytest.mark.parametrize(("changes", "message"), [
    ({"num_heads": 0}, "num_heads must be an integer of at least 1, not 0"),
    ({"d_model": 8.0}, "d_model must be an integer of at least 1, not 8.0"),
    ({"num_experts": -1}, "num_experts must be an integer of at least 0, not -1"),
    ({"num_experts": True}, "num_experts must be an integer of at least 0, not True"),
    ({"relative_attention_num_buckets": 3}, "relative_attention_num_buckets must be an integer of at least 4, not 3"),
    ({"load_balancing_loss_weight": float("nan")}, "load_balancing_loss_weight must be a number 0 or above, not nan"),
    ({"router_z_loss_weight": -1e-3}, "router_z_loss_weight must be a number 0 or above, not -0.001"),
    ({"second_place_loss_weight": float("inf")}, "second_place_loss_weight must be a number 0 or above, not inf"),
    ({"init_scale": float("inf")}, "init_scale must be a number above 0, not inf"),
    ({"attention_init_scale": -1.0}, "attention_init_scale must be a number above 0, not -1.0"),
    ({"remat": "yes"}, "remat must be True or False, not 'yes'"),
    ({"logits_via_embedding": 0}, "logits_via_embedding must be True or False, not 0"),
    ({"allow_non_causal_decoder": None}, "allow_non_causal_decoder must be True or False, not None"),
    ({"scale_decoder_outputs": "no"}, "scale_decoder_outputs must be True or False, not 'no'"),
    ({"dropout_rate": 1.0}, r"dropout_rate must be a number in \[0, 1\), not 1.0"),
    ({"train_capacity_factor": 0}, r"train_capacity_factor must be a number in \[1e-6, 1e6\], not 0"),
    ({"activation": "geglue"}, "'swiglu', 'reglu', not 'geglue'. Did you mean 'geglu'?"),
    ({"semantics": "t5"}, "semantics must be one of"),
    ({"expert_capacity": 64}, "expert_capacity=64 belongs to a sparse model with semantics='hf'"),
    ({"semantics": "hf", "num_experts": 8}, "expert_capacity must be an integer of at least 1, not None"),
    ({"relative_attention_max_distance": 16}, "relative_attention_max_distance must be above half"),
])
def test_impossible_values_are_refused_in_one_sentence(changes, message):
    with pytest.raises(ValueError, match=message) as raised:
        SwitchConfig(**changes)
    assert "\n" not in str(raised.value)


def test_numbers_of_numpy_are_as_good_as_pythons():
    config = SwitchConfig(d_model=np.int64(8), num_experts=np.int32(0), dropout_rate=np.float64(0.5), init_scale=1,
                          semantics="hf",
                          routing_policy="top2", num_selected_experts=np.int64(2))
    assert config == SwitchConfig(d_model=8, dropout_rate=0.5, semantics="hf", routing_policy="top2",
                                  num_selected_experts=2)
    assert json.loads(json.dumps(dataclasses.asdict(config))) == dataclasses.asdict(config)


def test_configs_can_be_changed_field_by_field():
    changed = dataclasses.replace(SwitchConfig.from_preset("switch_tiny"), num_experts=4)
    assert changed.num_experts == 4
