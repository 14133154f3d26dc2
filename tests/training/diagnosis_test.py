import keras
import numpy as np

from switch_tf import SwitchTransformer
from switch_tf.configs.run import StepSettings
from switch_tf.training import train_step


def _model(config):
    keras.utils.set_random_seed(0)
    model = SwitchTransformer(config)
    model.build()
    return model


def test_a_bad_weight_is_named(shallow_config, batch):
    model = _model(shallow_config)
    wo = model.decoder.layers[0].mlp.experts.wo
    wo.assign(np.full(wo.shape, np.inf))
    found = train_step.first_bad_tensor(model, batch, 0, 0, StepSettings())
    assert found == "the weight decoder/layers_0/mlp/experts/wo"


def test_the_first_layer_whose_output_overflows_is_named(shallow_config, batch):
    model = _model(shallow_config)
    for kernel in (model.encoder.layers[0].mlp.experts.input_kernels[0], model.encoder.layers[0].mlp.experts.wo):
        kernel.assign(np.full(kernel.shape, 1e30))
    found = train_step.first_bad_tensor(model, batch, 0, 0, StepSettings())
    assert found == "the output of encoder/layers_0/mlp/experts"


def test_the_layer_is_named_where_a_batch_is_processed_in_parts_too(shallow_config, batch):
    model = _model(shallow_config)
    for kernel in (model.encoder.layers[0].mlp.experts.input_kernels[0], model.encoder.layers[0].mlp.experts.wo):
        kernel.assign(np.full(kernel.shape, 1e30))
    found = train_step.first_bad_tensor(model, batch, 0, 0, StepSettings(num_microbatches=2))
    assert found == "the output of encoder/layers_0/mlp/experts"


def test_layers_are_as_before_afterwards(shallow_config, batch):
    model = _model(shallow_config)
    before = model(batch).numpy()
    found = train_step.first_bad_tensor(model, batch, 0, 0, StepSettings())
    assert found.startswith("nothing when the step was repeated")
    assert "call" not in vars(model.encoder.layers[0])
    np.testing.assert_array_equal(model(batch).numpy(), before)
