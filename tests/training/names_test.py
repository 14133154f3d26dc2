from switch_tf.training import names


def test_layers_are_found_in_names_and_ordered_as_in_the_model():
    layers = ["encoder/layers_3/attention/query", "encoder/layers_3/attention/key_value", "encoder/layers_3",
              "encoder/layers_11", "decoder/layers_1"]
    written = [names.router(layer, name) for layer in reversed(layers) for name in ("expert_load", "dead_experts")]
    assert names.sparse_layers(["step", "train/loss", *written]) == layers
