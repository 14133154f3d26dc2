"""Makes the checkpoints and numbers of tests/golden/t5x with T5X's and Flaxformer's own code.

Run by `make golden REFERENCES=folder`; the tests read what it wrote and need neither package. Each archive holds a
checkpoint as T5X's Checkpointer writes it, for the models of Flaxformer the `config.gin` of their own gin files, and
`expected.npz`:

* `<batch>/<feature>` and `<batch>/logits`, in evaluation, of a batch without padding, of one with padded inputs, with
  padded targets, with both, of one whose tokens the experts do not divide, and of packed rows. Tokens are dropped.
* `loss`, `z_loss`, and of each router `auxiliary_loss/`, `router_z_loss/` and `fraction_tokens_left_behind/`, of the
  batch with both, in training.
* `next/<parameter>`: the first 20 rows of each parameter after one more step of Adafactor on that loss.

Adafactor factors matrices of at least 8 rows and columns, 128 for real models, which this package always factors.
Weights are moved away from their initial values, norms too, and three steps are taken, so that slots are not empty.
"""

import pathlib
import shutil
import sys
import tempfile

import reference_code

FOLDER = pathlib.Path(__file__).parent / "t5x"
LEARNING_RATE, VOCAB_SIZE = 0.01, 64
SIZES = """
NUM_ENCODER_LAYERS = {num_layers}
NUM_DECODER_LAYERS = {num_layers}
NUM_HEADS = 3
HEAD_DIM = 4
EMBED_DIM = 16
MLP_DIM = 24
EXPERT_MLP_DIM = 20
NUM_EXPERTS = 4
NUM_ENCODER_SPARSE_LAYERS = {num_sparse}
NUM_DECODER_SPARSE_LAYERS = {num_sparse}
TRAIN_EXPERT_CAPACITY_FACTOR = 1.0
EVAL_EXPERT_CAPACITY_FACTOR = 0.8
NUM_EMBEDDINGS = 64
ACTIVATION_DTYPE = 'float32'
MOE_TRUNCATED_DTYPE = 'float32'
NUM_MODEL_PARTITIONS = 1
VOCABULARY = @seqio.PassThroughVocabulary()
seqio.PassThroughVocabulary.size = 64
moe_layers.MoeLayer.min_expert_capacity = 2
adafactor.Adafactor.min_dim_size_to_factor = 8
"""
HEADER = """
from __gin__ import dynamic_registration
import seqio
from flaxformer.architectures.moe import moe_layers
from t5x import adafactor
include 'flaxformer/t5x/configs/moe/models/{model}.gin'
"""
# Flaxformer's runs/scan.gin without the lines for Adafactor, which name a function that T5X no longer has.
SCAN = """
from flaxformer.architectures.moe import moe_architecture
from flaxformer.architectures.t5 import t5_architecture
from flaxformer.components import relative_position_biases
moe_architecture.SparseEncoder.scan_layers = True
moe_architecture.SparseDecoder.scan_layers = True
t5_architecture.EncoderDecoder.scan_layers = True
moe_architecture.SparseEncoder.shared_relative_position_bias_factory = None
moe_architecture.SparseDecoder.shared_relative_position_bias_factory = None
moe_architecture.SparseEncoderLayer.relative_position_bias_factory = @relative_position_biases.RelativePositionBiases
t5_architecture.EncoderLayer.relative_position_bias_factory = @relative_position_biases.RelativePositionBiases
moe_architecture.SparseDecoderLayer.relative_position_bias_factory = @relative_position_biases.RelativePositionBiases
t5_architecture.DecoderLayer.relative_position_bias_factory = @relative_position_biases.RelativePositionBiases
"""
# Name -> model file of Flaxformer, and whether its layers are scanned.
CASES = {"switch": ("switch_base", False), "switch_scanned": ("switch_base", True),
         "st_moe": ("st_moe_base", False), "st_moe_scanned": ("st_moe_base", True),
         "experts_choose": ("experts_choose_base", False)}


def batch(inputs, targets):
    """Returns T5X's features: decoder inputs are the targets, one place later."""
    return {"encoder_input_tokens": inputs, "decoder_target_tokens": targets,
            "decoder_input_tokens": np.pad(targets, ((0, 0), (1, 0)))[:, :-1]}


def batches():
    """Returns name -> features."""
    random = np.random.default_rng(0)
    inputs, targets = (random.integers(2, VOCAB_SIZE, (4, length)).astype("int32") for length in (14, 8))
    padded_inputs, padded_targets = inputs.copy(), targets.copy()
    padded_inputs[1, 9:] = padded_inputs[2, 5:] = 0
    for row, length in ((0, 7), (3, 4)):
        padded_targets[row, length - 1:] = 0
        padded_targets[row, length - 1] = 1
    packed = {name: tokens.copy() for name, tokens in batch(padded_inputs, padded_targets).items()}
    lengths = {"encoder": ((6, 8), (5, 4), (2, 3), (9, 5)), "decoder": ((3, 3), (4, 4), (6, 2), (2, 2))}
    for stack, rows in lengths.items():
        segments = np.zeros_like(packed[f"{stack}_input_tokens"])
        for row, (first, second) in enumerate(rows):
            segments[row, :first], segments[row, first:first + second] = 1, 2
        packed[f"{stack}_segment_ids"] = segments
        packed["decoder_target_tokens" if stack == "decoder" else "encoder_input_tokens"] *= segments > 0
    tokens = packed["decoder_input_tokens"]  # 0 where a segment begins, and at padding
    segments = packed["decoder_segment_ids"]
    tokens[:, 1:][(segments[:, 1:] != segments[:, :-1]) | (segments[:, 1:] == 0)] = 0
    return {"full": batch(inputs, targets), "inputs": batch(padded_inputs, targets),
            "targets": batch(inputs, padded_targets), "both": batch(padded_inputs, padded_targets),
            "odd": batch(inputs[:3, :13], padded_targets[:3, :7]), "packed": packed}


def flaxformer_model(case, gin_file):
    """Returns Flaxformer's model as its gin files describe it, and the text of T5X's config.gin."""
    model, is_scanned = CASES[case]
    num_sparse = 1 + is_scanned  # a scan needs two blocks
    gin_file.write_text((HEADER + is_scanned * SCAN + SIZES).format(
        model=model, num_layers=2 * num_sparse, num_sparse=num_sparse))
    gin.parse_config_file(str(gin_file))
    return gin.query_parameter("%MODEL").scoped_configurable_fn(), gin.config_str()


def t5_model():
    """Returns a T5 of T5X, and no gin file."""
    from t5x import adafactor, losses, models
    from t5x.examples.t5 import network

    module = network.Transformer(network.T5Config(
        vocab_size=VOCAB_SIZE, emb_dim=16, num_heads=3, num_encoder_layers=2, num_decoder_layers=1, head_dim=4,
        mlp_dim=24, mlp_activations=("gelu", "linear"), dropout_rate=0.0, logits_via_embedding=False))
    optimizer = adafactor.Adafactor(decay_rate=0.8, step_offset=0, min_dim_size_to_factor=8,
                                    logical_factor_rules=adafactor.standard_logical_factor_rules())
    vocabulary = seqio.PassThroughVocabulary(VOCAB_SIZE)
    return models.EncoderDecoderModel(
        module, vocabulary, vocabulary, optimizer, z_loss=1e-4,
        loss_normalizing_factor=losses.SpecialLossNormalizingFactor.NUM_REAL_TARGET_TOKENS), None


def flat(tree):
    return {"/".join(path): np.asarray(leaf) for path, leaf in
            flax.traverse_util.flatten_dict(flax.core.unfreeze(tree)).items()}


def make(case, model, config_gin, folder):
    """Trains a model for three steps; writes its checkpoint and its numbers into a folder."""
    from t5x import checkpoints, partitioning, train_state

    made = batches()
    padded, rng = made["both"], jax.random.PRNGKey(1)
    variables = flax.core.unfreeze(model.get_initial_variables(
        rng, {name: value.shape for name, value in padded.items()}))
    random = np.random.default_rng(1)
    variables["params"] = jax.tree_util.tree_map(
        lambda x: np.asarray(x) + 0.1 * random.standard_normal(x.shape).astype("float32"), variables["params"])
    state = train_state.FlaxOptimTrainState.create(model.optimizer_def, flax.core.freeze(variables))
    gradient = jax.jit(jax.grad(lambda params: model.loss_fn(params, padded, rng)[0]))
    for _ in range(3):
        state = state.apply_gradient(gradient(state.params), learning_rate=LEARNING_RATE)
    expected = {}
    for name, features in made.items():
        expected |= {f"{name}/{feature}": value for feature, value in features.items()}
        expected[f"{name}/logits"] = model.module.apply({"params": state.params}, **features, enable_dropout=False)
    loss, metrics = model.loss_fn(state.params, padded, rng)
    expected |= {"loss": loss, "z_loss": metrics["z_loss"].compute() if hasattr(metrics["z_loss"], "compute") else 0.0}
    _, sown = model._compute_logits(state.params, padded, rng, mutable=["intermediates"])
    for name, value in flat(sown.get("intermediates", {})).items():
        layer, _, kind = name.rpartition("/")
        if kind in ("auxiliary_loss", "router_z_loss", "fraction_tokens_left_behind"):
            expected[f"{kind}/{layer}"] = np.ravel(value)
    following = state.apply_gradient(gradient(state.params), learning_rate=LEARNING_RATE)
    expected |= {f"next/{name}": value[:20] for name, value in flat(following.params).items()}
    checkpoints.Checkpointer(state, partitioning.PjitPartitioner(num_partitions=1), str(folder)).save(state)
    (saved,) = folder.glob("checkpoint_*")
    if config_gin:
        (saved / "config.gin").write_text(config_gin)
    np.savez(saved / "expected.npz", **{name: np.asarray(value) for name, value in expected.items()})
    print(case, {name: np.round(np.asarray(value), 4).tolist() for name, value in expected.items()
                 if np.asarray(value).size < 9})
    return saved


def main():
    FOLDER.mkdir(exist_ok=True)
    for case in ("t5", *CASES):
        with tempfile.TemporaryDirectory() as scratch:
            scratch = pathlib.Path(scratch)
            model, config_gin = (flaxformer_model(case, scratch / "model.gin") if case in CASES
                                 else t5_model())
            saved = make(case, model, config_gin, scratch / "checkpoints")
            shutil.make_archive(str(FOLDER / case), "zip", saved)
        gin.clear_config()


if __name__ == "__main__":
    clones = pathlib.Path(sys.argv[1]).resolve()
    reference_code.use(clones)
    import flax
    import gin
    import jax
    import numpy as np
    import seqio

    gin.add_config_file_search_path(str(clones / "flaxformer"))
    main()
