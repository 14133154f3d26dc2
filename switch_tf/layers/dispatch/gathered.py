"""Dispatch without moving rows: each row looks up the kernels of its expert."""

import keras
from keras import ops

from switch_tf import partitioning
from switch_tf.layers.dispatch.base import Dispatcher
from switch_tf.layers.dispatch.index import sum_choices
from switch_tf.layers.experts import ExpertFeedForward
from switch_tf.layers.feed_forward import activate
from switch_tf.ops import products
from switch_tf.partitioning.tensors import Tensor
from switch_tf.refusals import Refusal


class Gathered(Dispatcher):
    """Computes each choice of TokenChoices as a row of its own, to predict a few tokens with static shapes.

    Buffers are rows, [group * tokens * choice, d_model].
    """

    def dispatch(self, tokens: Tensor) -> Tensor:
        num_choices = self.decisions.slot.shape[-1]
        return ops.reshape(ops.repeat(tokens, num_choices, axis=1), (-1, tokens.shape[-1]))

    def compute(self, experts: ExpertFeedForward, buffers: Tensor, training: bool) -> Tensor:
        if training:
            raise Refusal("Kernels are gathered for prediction alone; train with dispatch='index' or 'einsum'.")
        with keras.name_scope(experts.name):
            return gathered_feed_forward(experts, buffers, ops.reshape(self.decisions.expert_index, (-1,)))

    def combine(self, outputs: Tensor) -> Tensor:
        return sum_choices(outputs, self.decisions.gate)


def gathered_feed_forward(experts: ExpertFeedForward, rows: Tensor, expert_index: Tensor) -> Tensor:
    """Applies to each row the feed-forward layer of its expert, without dropout.

    Args:
        experts: ExpertFeedForward.
        rows: <compute dtype>[row, d_model].
        expert_index: <int32>[row]. The expert of each row.

    Returns:
        <compute dtype>[row, output_dim]
    """
    hidden = activate([_times(rows, wi, expert_index) for wi in experts.input_kernels], experts.activation)
    return _times(hidden, experts.wo, expert_index)


def _times(rows, kernels, expert_index):
    return products.in_blocks(rows, partitioning.use(kernels, kernels.dtype),
                              lambda part: ops.take(part, expert_index, axis=0))
