"""Refuses batches that a layout or the routers' groups cannot divide."""

from switch_tf import checks
from switch_tf.configs.switch_config import SwitchConfig
from switch_tf.layers import grouping
from switch_tf.partitioning.layout import Layout
from switch_tf.refusals import Refusal


def check_division(config: SwitchConfig, layout: Layout, batch_size: int, task_feature_lengths: dict,
                   num_microbatches: int) -> None:
    """Raises Refusal unless the batch can be cut into groups, microbatches and the pieces of a layout.

    Args:
        config: SwitchConfig.
        layout: Layout with its mesh complete.
        batch_size: int, sequences of the whole batch.
        task_feature_lengths: dict, "inputs" and "targets" in tokens.
        num_microbatches: int.
    """
    checks.lengths("TASK_FEATURE_LENGTHS", task_feature_lengths)
    if layout.is_one_program and config.dispatch in ("index", "ragged"):
        raise Refusal(f"dispatch={config.dispatch!r} moves rows by their place in one device's memory, and this "
                      "layout splits them over several; use dispatch='einsum' or 'auto'.")
    layout.check_sizes(config.axis_sizes)
    num_pieces = layout.num_pieces("batch")
    if batch_size % (num_microbatches * num_pieces):
        raise Refusal(
            f"BATCH_SIZE must be a multiple of {num_microbatches * num_pieces} ({num_microbatches} microbatch"
            f"{'es' * (num_microbatches > 1)} times {num_pieces} device{'s' * (num_pieces > 1)}), not {batch_size}.")
    if config.rules.groups_are_sequences:
        return
    num_parts = num_microbatches * layout.num_pieces("group")
    for feature, sparse_layers in (("inputs", config.encoder_sparse_layers), ("targets", config.decoder_sparse_layers)):
        if sparse_layers:
            grouping.check_batch(batch_size, task_feature_lengths[feature], config.grouping, num_parts)
