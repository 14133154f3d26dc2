"""A position bias for each layer instead of one for a stack."""

import dataclasses

import numpy as np
import pytest
from keras import ops

from switch_tf import SwitchConfig, SwitchTransformer, conversion
from switch_tf.conversion import model_gin

CONFIG = SwitchConfig(vocab_size=16, d_model=8, d_ff=12, d_kv=3, num_heads=2, num_encoder_layers=2,
                      num_decoder_layers=3, dropout_rate=0.0, relative_attention_num_buckets=8,
                      relative_attention_max_distance=12, relative_attention_per_layer=True)
FEATURES = {"encoder_input_tokens": np.array([[3, 4, 5, 6, 7, 8]]), "decoder_input_tokens": np.array([[0, 7, 8, 9]])}


@pytest.fixture
def model():
    model = SwitchTransformer(CONFIG)
    model.build()
    return model


def test_every_layer_has_one_and_the_stacks_have_none(model):
    biases = [weight.path.partition("/")[2] for weight in model.weights if "rel_embedding" in weight.path]
    assert biases == [f"{layer}/relpos_bias/rel_embedding" for layer in (
        "encoder/layers_0", "encoder/layers_1", "decoder/layers_0", "decoder/layers_1", "decoder/layers_2")]
    assert model.encoder.relpos_bias is None and model.decoder.relpos_bias is None
    # Three tables more than the two of a T5, of 2 heads by 8 buckets.
    shared = dataclasses.replace(CONFIG, relative_attention_per_layer=False)
    assert CONFIG.num_parameters - shared.num_parameters == 3 * 2 * 8


def test_equal_biases_are_a_shared_one(model):
    shared = SwitchTransformer(dataclasses.replace(CONFIG, relative_attention_per_layer=False))
    shared.build()
    theirs = {weight.path.partition("/")[2]: weight for weight in shared.weights}
    for weight in model.weights:
        stack, _, rest = weight.path.partition("/")[2].partition("/")
        if "rel_embedding" in rest:
            weight.assign(theirs[f"{stack}/relpos_bias/rel_embedding"])
        else:
            weight.assign(theirs[weight.path.partition("/")[2]])
    np.testing.assert_array_equal(model(FEATURES).numpy(), shared(FEATURES).numpy())


def test_each_layer_attends_with_its_own(model):
    # The encoder by hand: each layer is called with the bias that its table and the relative positions give.
    stack, embedded = model.encoder, np.random.RandomState(0).randn(1, 6, 8).astype("float32")
    is_real, mask = np.ones((1, 6), bool), np.ones((1, 1, 1, 6), bool)
    hidden = embedded
    for layer in stack.layers:
        hidden, _ = layer(hidden, is_real, mask, layer.relpos_bias(query_length=6, key_length=6))
    expected = ops.convert_to_numpy(stack.final_norm(hidden))
    np.testing.assert_allclose(stack(embedded, is_real, mask)[0].numpy(), expected, atol=1e-6)
    before = model(FEATURES).numpy()
    for layer in (*model.encoder.layers, *model.decoder.layers):  # none is without effect
        table = layer.relpos_bias.rel_embedding
        kept = table.numpy()
        table.assign(kept + np.random.RandomState(1).randn(2, 8))
        assert np.abs(model(FEATURES).numpy() - before).max() > 1e-4
        table.assign(kept)


def test_the_gin_file_of_its_weights_has_the_field(model):
    assert "SwitchConfig.relative_attention_per_layer = True\n" in model_gin.gin_text(model.config)


def test_hugging_faces_umt5_holds_it(model, tmp_path):
    conversion.to_hugging_face(model, tmp_path / "out")
    back = conversion.from_hugging_face(tmp_path / "out")
    assert back.config.relative_attention_per_layer
    for ours, theirs in zip(model.get_weights(), back.get_weights(), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_only_true_and_false_are_taken():
    with pytest.raises(ValueError, match="relative_attention_per_layer must be True or False"):
        dataclasses.replace(CONFIG, relative_attention_per_layer=1)
