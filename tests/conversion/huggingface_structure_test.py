import pytest

from switch_tf.conversion import huggingface_config


def test_layers_experts_and_logits_by_name():
    structure = huggingface_config.read_structure([
        "shared.weight", "encoder.block.2.layer.0.SelfAttention.q.weight", "encoder.block.0.layer.1.mlp.wi.weight",
        "encoder.block.1.layer.1.mlp.router.classifier.weight", "decoder.block.0.layer.2.DenseReluDense.wo.weight",
        "decoder.block.1.layer.2.mlp.experts.expert_0.wi_0.weight"])
    assert structure == huggingface_config.Structure(
        num_layers={"encoder": 3, "decoder": 2}, sparse_layers={"encoder": {1}, "decoder": {1}},
        dense_layers={"encoder": {0}, "decoder": {0}}, is_gated=True, has_logits=False, has_t5x_logits=False)


@pytest.mark.parametrize("name, has_t5x_logits", [("lm_head.weight", False), ("decoder.logits_dense.weight", True)])
def test_logits_of_their_own(name, has_t5x_logits):
    structure = huggingface_config.read_structure([name])
    assert (structure.has_logits, structure.has_t5x_logits) == (True, has_t5x_logits)


@pytest.mark.parametrize("num_layers, step, layers", [
    (6, 0, ()), (3, 1, (0, 1, 2)), (6, 2, (1, 3, 5)), (10, 4, (1, 5, 9)), (4, 4, (1,)), (1, 2, ())])
def test_sparse_layers_by_hand(num_layers, step, layers):
    assert huggingface_config.sparse_layers(num_layers, step) == layers
    assert huggingface_config.step_for(layers, num_layers, step) == step


def test_a_step_is_found_for_layers():
    # Layer 1 alone: 3 is the smallest step whose next layer, 4, is beyond the last; 4 does it too.
    assert huggingface_config.step_for((1,), 4, preferred=2) == 3
    assert huggingface_config.step_for((1,), 4, preferred=4) == 4
    assert huggingface_config.step_for((3, 7), 8, preferred=4) is None
    assert huggingface_config.step_for((0, 2), 4, preferred=2) is None
