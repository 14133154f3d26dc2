"""Makes the checkpoints and numbers of tests/golden/mesh_tensorflow with Mesh TensorFlow's own code.

Run by `make golden REFERENCES=folder`; the tests read what it wrote and need no clone. "experts_first" has the block of
Mesh TensorFlow's bi_moe.gin in both stacks, experts first and wider than the dense layer, and two experts for each
token; "switch" has experts second, and one. Each archive holds a checkpoint of TensorFlow 1 after three steps, with the
slots of Adafactor, in two files, and `expected.npz`:

* `inputs`, `targets`: padded. Tokens are dropped.
* `logits` in evaluation; `loss` in training, and that of each router, weighted, `router/<number>`.
* `next/<variable>`: each variable after one more step.
"""

import pathlib
import shutil
import sys
import tempfile

import reference_code

FOLDER = pathlib.Path(__file__).parent / "mesh_tensorflow"
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
EXPERTS = {"num_experts": 4, "hidden_size": 20, "group_size": 16, "min_expert_capacity": 1,
           "capacity_factor_train": 1.0, "capacity_factor_eval": 0.8, "z_loss": 0.1}
# Without random numbers.
ROUTERS = {"switch": {"moe_gating": "switch", "switch_policy_train": "argmax", "switch_policy_eval": "argmax"},
           "experts_first": {"moe_gating": "top_2", "second_policy_train": "all", "second_policy_eval": "all"}}


def bitransformer(mtf, case):
    """Returns the model. Vocabularies are padded to 128."""
    from mesh_tensorflow.transformer import moe, transformer, transformer_layers

    attention = {"num_heads": 2, "key_value_size": 3}
    own = transformer_layers.SelfAttention, {**attention, "relative_attention_type": "bias_shared"}
    cross = transformer_layers.EncDecAttention, attention
    dense = transformer_layers.DenseReluDense, {"hidden_size": 12}
    pair = [dense, (moe.MoE1D, {**EXPERTS, **ROUTERS[case]})]
    pair = pair[::-1] if case == "experts_first" else pair
    parts = [transformer.Unitransformer(
        layer_stack=transformer.make_layer_stack(layers=layers, num_layers=1), input_vocab_size=100,
        output_vocab_size=vocab_size, autoregressive=name == "decoder", name=name,
        layout=mtf.convert_to_layout_rules("batch:all"), mesh_shape=mtf.convert_to_shape("all:1"))
        for name, vocab_size, layers in (
            ("encoder", None, [own, pair[0], own, pair[1]]),
            ("decoder", 100, [own, cross, pair[0], own, cross, pair[1]]))]
    return transformer.Bitransformer(*parts)


def record_routers(moe):
    """Returns a list that gets the loss of each layer of experts."""
    losses, layer = [], moe.transformer_moe_layer_v1

    def recorded(*args, **kwargs):
        outputs, loss = layer(*args, **kwargs)
        losses.append(loss)
        return outputs, loss

    moe.transformer_moe_layer_v1 = recorded
    return losses


def make(mtf, case, folder):
    """Trains a model for three steps; writes its checkpoint and its numbers into a folder."""
    from mesh_tensorflow.transformer import moe

    random = np.random.RandomState(0)
    inputs, targets = random.randint(2, 100, (4, 12)), random.randint(2, 100, (4, 8))
    inputs[1, 9:] = inputs[2, 4:] = targets[0, 6:] = targets[3, 3:] = 0
    with tf.Graph().as_default():
        tf1.set_random_seed(3)
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        ids = [mtf.import_tf_tensor(mesh, tf.constant(values, tf.int32), mtf.Shape(
            [mtf.Dimension("batch", 4), mtf.Dimension("length", values.shape[1])])) for values in (inputs, targets)]
        model, dtype = bitransformer(mtf, case), mtf.VariableDType(tf.float32)
        logits, _ = model.call_simple(*ids, compute_loss=False, mode="eval", variable_dtype=dtype)
        routers = record_routers(moe)
        with tf1.variable_scope(tf1.get_variable_scope(), reuse=True):
            _, loss = model.call_simple(*ids, compute_loss=True, mode="train", variable_dtype=dtype)
        weights = graph.trainable_variables
        steps = mtf.optimize.AdafactorOptimizer(learning_rate=0.05, min_dim_size_to_factor=5).apply_grads(
            mtf.gradients([loss], [weight.outputs[0] for weight in weights]), weights)
        lowering = mtf.Lowering(graph, {mesh: mtf.placement_mesh_impl.PlacementMeshImpl("all:1", "batch:all", [""])})
        step = [lowering.lowered_operation(one) for one in steps]
        values = {name: lowering.export_to_tf_tensor(one) for name, one in (
            ("logits", logits), ("loss", loss), *((f"router/{i}", one) for i, one in enumerate(routers)))}
        count = tf1.assign_add(tf1.train.get_or_create_global_step(), 1)
        with tf1.Session() as session:
            session.run(tf1.global_variables_initializer())
            session.run(lowering.copy_masters_to_slices())
            for _ in range(NUM_STEPS):
                session.run(step)
                session.run(count)
            session.run(lowering.copy_slices_to_masters())
            tf1.train.Saver(tf1.global_variables(), sharded=True, save_relative_paths=True).save(
                session, str(folder / "model.ckpt"), global_step=NUM_STEPS, write_meta_graph=False)
            numbers = session.run(values)
            session.run(step)
            session.run(lowering.copy_slices_to_masters())
            following = {variable.op.name: session.run(variable) for variable in tf1.global_variables()
                         if "slot" not in variable.op.name}
    print(case, {name: value for name, value in numbers.items() if np.size(value) == 1})
    np.savez_compressed(folder / "expected.npz", inputs=inputs, targets=targets, **numbers,
                        **{f"next/{name}": value for name, value in following.items()})


def main():
    import mesh_tensorflow as mtf

    gin.parse_config(DEFAULTS)
    FOLDER.mkdir(exist_ok=True)
    for case in ROUTERS:
        with tempfile.TemporaryDirectory() as scratch:
            make(mtf, case, pathlib.Path(scratch))
            shutil.make_archive(str(FOLDER / case), "zip", scratch)


if __name__ == "__main__":
    reference_code.use(pathlib.Path(sys.argv[1]).resolve())
    reference_code.use_tensorflow_1()
    import gin
    import numpy as np
    import tensorflow as tf
    import tensorflow.compat.v1 as tf1

    main()
