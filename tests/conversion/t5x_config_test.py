"""The model of a T5X checkpoint, from the gin file beside it, which is read as text."""

import pytest

from switch_tf import SwitchConfig, conversion
from switch_tf.cli import main
from switch_tf.conversion import model_gin, t5x_config
from switch_tf.refusals import Refusal
from switch_tf.storage import places
from tests.conversion.shared import golden, refusal
from tests.conversion.t5x_checkpoints import write

# As gin writes it: imports, macros, then a section for each class.
T5 = """
from __gin__ import dynamic_registration
import seqio
from t5x.examples.t5 import network

# Macros:
# ==============================================================================
BATCH_SIZE = 128
DROPOUT_RATE = 0.25  # in "quotes" '#
EMBED = 16

# Parameters for network.T5Config:
# ==============================================================================
network.T5Config.dropout_rate = %DROPOUT_RATE
network.T5Config.dtype = 'bfloat16'
network.T5Config.emb_dim = %EMBED
network.T5Config.head_dim = 4
network.T5Config.logits_via_embedding = True
network.T5Config.mlp_activations = \\
    ('relu',)
network.T5Config.mlp_dim = 24
network.T5Config.num_decoder_layers = 3
network.T5Config.num_encoder_layers = 2
network.T5Config.num_heads = 3
network.T5Config.vocab_size = 64

# Parameters for network.Transformer:
network.Transformer.config = @network.T5Config()
trainer.Trainer.learning_rate_fn = @utils.create_learning_rate_scheduler()
"""
MOE = """
from __gin__ import dynamic_registration
from flaxformer.architectures.moe import moe_architecture

NUM_LAYERS = 4
DECODER_LAYERS = 2
LAYOUT = %moe_enums.LayerLayout.MIXED
DROPOUT_RATE = 0.0
MLP = @dense.MlpBlock()

t5_architecture.EncoderDecoder:
  encoder_factory = @moe_architecture.SparseEncoder
  decoder_factory = @moe_architecture.SparseDecoder
  shared_token_embedder_factory = @embedding.Embed
  dtype = 'bfloat16'

moe_architecture.SparseEncoder:
  num_layers = %NUM_LAYERS
  num_sparse_layers = 2
  sparse_layout = %LAYOUT
  shared_relative_position_bias_factory = @relative_position_biases.RelativePositionBiases
moe_architecture.SparseDecoder:
  num_layers = %DECODER_LAYERS
  num_sparse_layers = 1
  output_logits_factory = None
  shared_relative_position_bias_factory = @relative_position_biases.RelativePositionBiases
moe_architecture.SparseEncoderLayer.mlp = @sparse_encoder/moe_layers.MoeLayer()
t5_architecture.EncoderLayer.mlp = %MLP
flaxformer.components.embedding.Embed.num_embeddings = 64
embedding.Embed.features = 16
dense_attention.MultiHeadDotProductAttention:
  num_heads = 3
  head_dim = 4
  use_bias = False
dense.MlpBlock:
  intermediate_dim = 24
  activations = ['relu']
  intermediate_dropout_rate = %DROPOUT_RATE
expert/dense.MlpBlock:
  activations = (
      'relu',
  )
  intermediate_dropout_rate = 0.4
relative_position_biases.RelativePositionBiases:
  num_buckets = 8
  max_distance = 12
moe_layers.MoeLayer:
  num_experts = 4
  max_group_size = 64
  train_capacity_factor = 1.5
  eval_capacity_factor = 3.0
  expert = @expert/dense.MlpBlock()
sparse_encoder/moe_layers.MoeLayer.router = @sparse_encoder/routing.TokensChooseMaskedRouter()
sparse_decoder/moe_layers.MoeLayer.router = @sparse_decoder/routing.TokensChooseMaskedRouter()
routing.TokensChooseMaskedRouter:
  num_selected_experts = 1
  jitter_noise = 0.0
  batch_prioritized_routing = False
sparse_encoder/routing.TokensChooseMaskedRouter.batch_prioritized_routing = True
models.MoeEncoderDecoderModel.aux_loss_factor = 0.03
models.MoeEncoderDecoderModel.router_z_loss_factor = 0.006
"""


def config_of(tmp_path, text):
    path = tmp_path / "config.gin"
    path.write_text(text)
    return t5x_config.read(path)


def test_t5xs_own_t5(tmp_path):
    assert config_of(tmp_path, T5) == SwitchConfig(
        vocab_size=64, d_model=16, d_ff=24, d_kv=4, num_heads=3, num_encoder_layers=2, num_decoder_layers=3,
        activation="relu", logits_via_embedding=True, dropout_rate=0.25)


def test_flaxformers_mixture_of_experts(tmp_path):
    # T5X averages its losses over the 2 + 1 sparse layers.
    assert config_of(tmp_path, MOE) == SwitchConfig(
        vocab_size=64, d_model=16, d_ff=24, d_kv=4, num_heads=3, num_encoder_layers=4, num_decoder_layers=2,
        dropout_rate=0.0, expert_dropout_rate=0.4, relative_attention_num_buckets=8,
        relative_attention_max_distance=12, num_experts=4, expert_d_ff=24, encoder_sparse_step=2,
        decoder_sparse_step=2, group_size=64, train_capacity_factor=1.5, eval_capacity_factor=3.0,
        routing_policy="batch_prioritized", decoder_routing_policy="switch", jitter_noise=0.0,
        second_expert_policy="all", load_balancing_loss_weight=0.01, router_z_loss_weight=0.002, semantics="t5x")


@pytest.mark.parametrize(("text", "more", "field", "value"), [
    (T5, "network.T5Config.mlp_activations = ('gelu', 'linear')", "activation", "geglu"),
    (T5, "network.T5Config.scan_layers = True", "relative_attention_per_layer", True),
    (T5, "EMBED = 32", "d_model", 32),
    (MOE, "expert/dense.MlpBlock.intermediate_dim = 48", "expert_d_ff", 48),
    (MOE, "moe_architecture.SparseEncoder.num_sparse_layers = 4", "encoder_sparse_layers", (0, 1, 2, 3)),
    (MOE, "moe_architecture.SparseDecoder.output_logits_factory = @output_logits/dense.DenseGeneral",
     "logits_via_embedding", False),
    (MOE, "moe_architecture.SparseEncoderLayer.extra_mlp = @dense.MlpBlock()\n"
     "moe_architecture.SparseDecoderLayer.extra_mlp = @dense.MlpBlock()", "extra_mlp", True),
    (MOE, "moe_architecture.SparseEncoder.shared_relative_position_bias_factory = None\n"
     "moe_architecture.SparseDecoder.shared_relative_position_bias_factory = None", "relative_attention_per_layer",
     True)])
def test_single_values(text, more, field, value, tmp_path):
    assert getattr(config_of(tmp_path, f"{text}\n{more}\n"), field) == value


@pytest.mark.parametrize(("text", "more", "message"), [
    (T5, "network.T5Config.num_fingers = 5", "network.T5Config.num_fingers is 5, and it is not known what that means"),
    (T5, "x/network.T5Config.emb_dim = 9", "x/network.T5Config.emb_dim is 9, and it is not known what that means"),
    (MOE, "x/dense_attention.MultiHeadDotProductAttention.num_heads = 9",
     "x/dense_attention.MultiHeadDotProductAttention.num_heads is 9, and it is not known what that means"),
    (T5, "network.T5Config.emb_dim = %NOWHERE", "d_model would be %NOWHERE, which is no value"),
    (T5, "network.T5Config.emb_dim = 8 * 2", "cannot be read: Expected newline"),
    (T5, "network.T5Config.emb_dim = -3", "d_model must be an integer of at least 1, not -3"),
    (T5, "network.T5Config.mlp_activations = ('tanh',)", "the activations are ('tanh',), and this package has"),
    (T5, "include 't5x/examples/t5/t5_1_1/base.gin'", "it includes 't5x/examples/t5/t5_1_1/base.gin', which is not"),
    (T5.replace("network.T5Config.vocab_size = 64", ""), "", "network.T5Config.vocab_size is missing"),
    (MOE, "t5_architecture.EncoderLayer.attention = @longt5.EtcTransientGlobalAttention()",
     "t5_architecture.EncoderLayer.attention is @longt5.EtcTransientGlobalAttention(), and it is not known"),
    (MOE, "dense.MlpBlock.use_bias = True", "dense.MlpBlock.use_bias is True, and it is not known"),
    (MOE, "moe_architecture.SparseEncoder.sparse_layout = %moe_enums.LayerLayout.TOP",
     "moe_architecture.SparseEncoder.sparse_layout is %moe_enums.LayerLayout.TOP"),
    (MOE, "moe_architecture.SparseEncoder.num_sparse_layers = 3", "num_sparse_layers is 3"),
    (MOE, "sparse_encoder/moe_layers.MoeLayer.router = @my.Router()", "sparse_encoder/moe_layers.MoeLayer.router is"),
    (MOE, "expert/dense.MlpBlock.activations = ('gelu', 'linear')", "expert/dense.MlpBlock.activations is"),
    (MOE, "sparse_decoder/routing.TokensChooseMaskedRouter.num_selected_experts = 2", "the router of the decoder is"),
    (MOE.replace("  head_dim = 4\n", ""), "", "dense_attention.MultiHeadDotProductAttention.head_dim is missing"),
    (T5, "network.T5Config.emb_dim", "cannot be read: Couldn't parse statement, expected ':' or '='")])
def test_what_is_not_understood_is_refused_by_its_name(text, more, message, tmp_path):
    said = refusal(config_of, tmp_path, f"{text}\n{more}\n")
    assert message in said and "--gin_file" in said


@pytest.mark.parametrize("value", ["__import__('pathlib').Path('{}').touch()", "(" * 9999, "'" + "x" * 70_000,
                                   "[" * 300, "{}[0]", "'\\"])
def test_values_are_never_executed_and_damage_is_a_sentence(value, tmp_path):
    trace = tmp_path / "trace"
    refusal(config_of, tmp_path, f"{T5}\nnetwork.T5Config.emb_dim = {value.replace('{}', str(trace))}\n")
    assert not trace.exists()


def test_other_gin_files_are_none_of_t5xs(tmp_path):
    assert config_of(tmp_path, "switch_config.SwitchConfig.d_model = 3\ninclude 'x.gin'\n") is None
    (tmp_path / "large").mkdir()
    assert "is larger than 1048576 bytes" in refusal(config_of, tmp_path / "large", "# " + "x" * 2**20)


TEXT = f"{T5}\nnetwork.T5Config.dropout_rate = 0.1\n"


@pytest.fixture
def run(tmp_path):
    """A run folder of T5X with a checkpoint and its gin file."""
    _, arrays = golden("t5_1_0")
    (tmp_path / "run").mkdir()
    # T5X's own T5 has 32 buckets.
    arrays = {name: values if "relpos" not in name else values.repeat(4, 1) for name, values in arrays.items()}
    write(tmp_path / "run" / "checkpoint_7", arrays)
    (tmp_path / "run" / "config.gin").write_text(TEXT)
    return tmp_path / "run"


@pytest.fixture
def convert(run, capsys):
    """A function that converts the checkpoint; returns the status, and what was said."""
    def convert(*words):
        status = main.main(["convert", f"--input={run / 'checkpoint_7'}", f"--output={run.parent / 'out'}", *words])
        return status, "".join(capsys.readouterr())

    return convert


def test_the_file_above_the_checkpoint_describes_its_model(run, convert):
    status, said = convert()
    assert status == 0 and f"Its model is taken from {run / 'config.gin'}." in said
    assert conversion.from_switch_tf(run.parent / "out").config == t5x_config.read(run / "config.gin")


def test_a_checkpoint_in_a_bucket_is_described_too(run, bucket):
    place = places.at(bucket.new_folder())
    places.upload(run, place)
    for folder in (place / "checkpoint_7", place / "checkpoint_7" / "state"):
        assert t5x_config.find(folder) == (t5x_config.read(run / "config.gin"), place / "config.gin")
    assert t5x_config.find(place.parent / "nowhere" / "checkpoint_7") is None


def test_the_file_beside_it_comes_first_and_its_shapes_are_compared(run, convert):
    (run / "checkpoint_7" / "model.gin").write_text(f"{TEXT}\nnetwork.T5Config.vocab_size = 80\n")
    status, said = convert()
    assert status == 2 and "has shape (64, 16), but its configuration asks for (80, 16)" in said


def test_a_gin_file_of_the_command_wins(run, convert, tmp_path):
    model = tmp_path / "model.gin"
    model.write_text(model_gin.gin_text(t5x_config.read(run / "config.gin")))
    (run / "config.gin").write_text("network.T5Config.emb_dim = @nonsense\n")
    status, said = convert()
    assert status == 2 and "give its configuration with --gin_file" in said
    status, said = convert(f"--gin_file={model}")
    assert status == 0 and "Its model is taken" not in said


@pytest.mark.parametrize("text", ["\\'" * 2**19, "a = '" + "\\'" * 2**18, "'" * 2**20, "a = (\n" + "(\n" * 2**18,
                                  "a = [\n" + "1,\n" * 300_000, "a = \"" + "\\" * 2**19], ids=range(6))
def test_a_file_that_would_take_hours_is_read_or_refused_in_less_than_a_second(text, tmp_path):
    (tmp_path / "config.gin").write_text(text)
    try:
        assert t5x_config.read(tmp_path / "config.gin") is None
    except Refusal as error:
        assert "give its configuration with --gin_file" in str(error)
