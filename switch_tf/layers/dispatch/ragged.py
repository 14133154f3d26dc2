"""Dispatch by gathers to rows without empty slots."""

import keras
from keras import ops

from switch_tf.layers.decisions import TokenChoices
from switch_tf.layers.dispatch.base import Dispatcher
from switch_tf.layers.dispatch.index import buffer_index, sum_choices
from switch_tf.layers.dispatch.ragged_feed_forward import RaggedRows, ragged_feed_forward
from switch_tf.layers.dispatch.rows import collect, fill, row_maps
from switch_tf.layers.experts import ExpertFeedForward
from switch_tf.ops import forms, random
from switch_tf.partitioning.tensors import Tensor
from switch_tf.refusals import Refusal


class Ragged(Dispatcher):
    """Dispatches TokenChoices by gathers to rows sorted by expert.

    The number of rows per expert depends on values, so XLA cannot compile it. Buffers are rows,
    [group * tokens * choice + 1, d_model]. The last one is always empty: choices without a row read its zeros. Other
    empty rows are never read, and their contents are arbitrary.
    """

    def __init__(self, decisions: TokenChoices):
        if "ragged" not in forms.suited_dispatches():
            raise Refusal("dispatch='ragged' needs shapes that depend on values, as TensorFlow has them on CPU "
                          "without XLA; elsewhere use dispatch='index'.")
        super().__init__(decisions)
        num_groups, group_tokens, num_choices = ops.shape(decisions.slot)
        num_experts, num_rows = decisions.num_experts, num_groups * group_tokens * num_choices
        buffer = buffer_index(decisions)
        lengths = ops.segment_sum(ops.reshape(ops.cast(decisions.is_filled, "int32"), (-1,)),
                                  ops.reshape(buffer, (-1,)), num_segments=num_experts * num_groups)
        starts = ops.cumsum(lengths) - lengths
        maps = row_maps(decisions.is_filled, ops.take(starts, buffer) + decisions.slot, num_rows)
        # One more row, which is empty. Empty rows may hold anything, so any valid index does.
        choice_of_row = ops.append(maps.choice_of_row, 0) % ops.size(maps.row_of_choice)
        self._maps = maps._replace(choice_of_row=choice_of_row, token_of_row=choice_of_row // num_choices)
        group = ops.take(random.batch_positions(num_groups), buffer % num_groups)
        place = decisions.slot * num_experts + decisions.expert_index
        self._owners = RaggedRows(ops.sum(ops.reshape(lengths, (num_experts, num_groups)), axis=1),
                                  ops.take(group, choice_of_row), ops.take(place, choice_of_row))

    def dispatch(self, tokens: Tensor) -> Tensor:
        return fill(tokens, self._maps, _take)

    def compute(self, experts: ExpertFeedForward, buffers: Tensor, training: bool) -> Tensor:
        with keras.name_scope(experts.name):
            return ragged_feed_forward(experts, buffers, self._owners, training)

    def combine(self, outputs: Tensor) -> Tensor:
        return sum_choices(collect(outputs, self._maps, _take), self.decisions.gate)


def _take(rows, index):
    return ops.take(rows, index, axis=0)
