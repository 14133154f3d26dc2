"""Makes the checkpoint and the logits of tests/golden/mesh_checkpoint with Mesh TensorFlow's own code.

Run by hand with a clone of github.com/tensorflow/mesh (da90793 of May 2021) in PYTHONPATH; the tests read what it wrote
and need no clone. The model has the block of Mesh TensorFlow's bi_moe.gin in both stacks, experts first and wider than
the dense layer, T5's position biases, and switch gating. Of 4 slots for each of 4 experts some are taken by more
tokens. Three steps of Adafactor make norms differ from 1 and leave slots beside the weights.

Mesh TensorFlow is of TensorFlow 1: of what newer versions lack, three names are put back, and modules for training on
data are left out.
"""

import pathlib
import shutil
import sys
import types

import gin
import numpy as np
import tensorflow as tf
import tensorflow.compat.v1 as tf1
from tensorflow.python.framework import ops, tensor_conversion_registry

FOLDER = pathlib.Path(__file__).with_suffix("")
NUM_STEPS = 3
DEFAULTS = """
import mesh_tensorflow.transformer.transformer
transformer.sublayer_dropout.dropout_rate = 0.0
transformer.LayerStack.sublayers_initial = [@transformer.sublayer_dropout]
transformer.LayerStack.sublayers_per_layer = [
    @transformer.sublayer_rms_norm, @transformer.sublayer_call_layer, @transformer.sublayer_dropout,
    @transformer.sublayer_residual]
transformer.LayerStack.sublayers_final = [@transformer.sublayer_rms_norm, @transformer.sublayer_dropout]
Unitransformer.d_model = 8
Unitransformer.max_length = 16
Unitransformer.positional_embedding = False
Unitransformer.shared_embedding_and_softmax_weights = True
Bitransformer.shared_embedding = True
"""


def mesh_tensorflow():
    """Imports Mesh TensorFlow."""
    tf1.estimator = tf.estimator = types.SimpleNamespace(
        CheckpointSaverListener=object, SessionRunHook=tf1.train.SessionRunHook,
        ModeKeys=types.SimpleNamespace(TRAIN="train", EVAL="eval", PREDICT="infer"))
    ops.register_tensor_conversion_function = tensor_conversion_registry.register_tensor_conversion_function
    for name in ("utils", "dataset", "t2t_vocabulary", "vocabulary"):
        sys.modules[f"mesh_tensorflow.transformer.{name}"] = types.ModuleType(name)
    import mesh_tensorflow

    return mesh_tensorflow


def bitransformer(mtf):
    """Returns the model. Vocabularies are padded to 128."""
    from mesh_tensorflow.transformer import moe, transformer, transformer_layers

    gin.parse_config(DEFAULTS)
    attention = {"num_heads": 2, "key_value_size": 3}
    own = transformer_layers.SelfAttention, {**attention, "relative_attention_type": "bias_shared"}
    cross = transformer_layers.EncDecAttention, attention
    dense = transformer_layers.DenseReluDense, {"hidden_size": 12}
    experts = moe.MoE1D, {"num_experts": 4, "hidden_size": 20, "moe_gating": "switch", "capacity_factor_eval": 1.0}
    parts = [transformer.Unitransformer(
        layer_stack=transformer.make_layer_stack(layers=layers, num_layers=1), input_vocab_size=100,
        output_vocab_size=vocab_size, autoregressive=name == "decoder", name=name,
        layout=mtf.convert_to_layout_rules("batch:all"), mesh_shape=mtf.convert_to_shape("all:1"))
        for name, vocab_size, layers in (
            ("encoder", None, [own, experts, own, dense]),
            ("decoder", 100, [own, cross, experts, own, cross, dense]))]
    return transformer.Bitransformer(*parts)


def main():
    mtf = mesh_tensorflow()
    random = np.random.RandomState(0)
    inputs, targets = random.randint(2, 100, (2, 12)), random.randint(2, 100, (2, 10))
    inputs[1, 9:] = targets[0, 8:] = 0
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir()
    with tf.Graph().as_default():
        tf1.set_random_seed(3)
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        ids = [mtf.import_tf_tensor(mesh, tf.constant(values, tf.int32), mtf.Shape(
            [mtf.Dimension("batch", 2), mtf.Dimension("length", values.shape[1])])) for values in (inputs, targets)]
        logits, loss = bitransformer(mtf).call_simple(
            *ids, compute_loss=True, mode="eval", variable_dtype=mtf.VariableDType(tf.float32))
        weights = graph.trainable_variables
        steps = mtf.optimize.AdafactorOptimizer(learning_rate=0.05, min_dim_size_to_factor=4).apply_grads(
            mtf.gradients([loss], [weight.outputs[0] for weight in weights]), weights)
        lowering = mtf.Lowering(graph, {mesh: mtf.placement_mesh_impl.PlacementMeshImpl("all:1", "batch:all", [""])})
        values, step = lowering.export_to_tf_tensor(logits), [lowering.lowered_operation(one) for one in steps]
        tf1.train.get_or_create_global_step()
        with tf1.Session() as session:
            session.run(tf1.global_variables_initializer())
            session.run(lowering.copy_masters_to_slices())
            for _ in range(NUM_STEPS):
                session.run(step)
            session.run(lowering.copy_slices_to_masters())
            np.savez_compressed(FOLDER / "expected.npz", inputs=inputs, targets=targets, logits=session.run(values))
            tf1.train.Saver(tf1.global_variables(), sharded=True, save_relative_paths=True).save(
                session, str(FOLDER / "model.ckpt"), global_step=NUM_STEPS, write_meta_graph=False)


if __name__ == "__main__":
    main()
