"""Dispatch of tokens to experts and combination of their outputs, in four forms with the same results.

`Einsum` is GShard's form (section 3.1 there): products with one-hot masks, which TPU partitioners turn into one
all-to-all each way. Its cost grows with tokens times slots. `Index` gathers rows. Slot-to-token and token-to-slot maps
are inverse on the kept tokens, so the gradient of each gather is the other gather, without a scatter of rows, and cost
and memory grow with tokens. `Ragged` gathers too, without empty slots: each expert computes its own rows. It is fastest
for few experts on CPU. `Gather` looks up the kernels of each row, to decode a few sequences with static shapes.

If experts choose, a token may be in many slots, and combining is a segment sum instead of a gather.
"""

import functools

import keras
from keras import ops

from switch_tf import partitioning
from switch_tf.layers import grouping
from switch_tf.layers.ragged import RaggedRows
from switch_tf.ops import dtypes, forms, random
from switch_tf.refusals import Refusal

# Axes of the slot buffers: on the devices of the groups, on those of the experts, and as experts read them.
AT_GROUPS = (None, "group", "capacity", "expert_embed")
AT_EXPERTS = ("expert", "group", "capacity", "expert_embed")
READ_BY_EXPERTS = ("expert", "group", "capacity", "embed")
# Overhead of one product per expert, in rows (docs/benchmarks.md).
ROWS_PER_PRODUCT = 40
# Most rows for `Gather`: two choices for each row of the largest batch that `decoding.loop` compiles by XLA.
LOOKED_UP_ROWS = 16


def _named(name):
    """Puts a method's operations into a name scope, by which `aot.origin` attributes time."""

    def decorate(method):
        @functools.wraps(method)
        def scoped(*args):
            with keras.name_scope(name):
                return method(*args)

        return scoped

    return decorate


def best(decisions) -> str:
    """Returns the name of the fastest dispatch of TokenChoices on the current device."""
    first, *others = forms.suited_dispatches()
    num_groups, num_tokens, num_choices = decisions.slot.shape
    if first != "ragged":
        # A decoding step of a few sequences: buffers would have a row for every expert and sequence.
        is_step = grouping.is_no_drop() and num_tokens == 1 and isinstance(num_groups, int)
        looks_up = is_step and num_groups * num_choices <= LOOKED_UP_ROWS and not partitioning.is_partitioned()
        return "gather" if looks_up else first
    if not all(isinstance(size, int) for size in (num_groups, num_tokens, decisions.capacity)):
        # Without drops, nearly all slots are empty.
        return "ragged" if grouping.is_no_drop() else others[0]
    # A decoding step, or fewer choices than experts: most slots are empty, and reading kernels takes most of the time.
    if num_tokens == 1 or num_groups * num_tokens * num_choices < decisions.num_experts:
        return "ragged"
    ragged_rows = num_groups * num_tokens * num_choices + decisions.num_experts * ROWS_PER_PRODUCT
    return "ragged" if ragged_rows < decisions.num_experts * num_groups * decisions.capacity else others[0]


def best_of_experts() -> str:
    """Returns the name of the fastest dispatch of ExpertChoices, which has no empty slots, on the current device."""
    return next(name for name in forms.suited_dispatches() if name != "ragged")


class Einsum:
    """Dispatches and combines by products with masks.

    Args:
        decisions: `decisions.TokenChoices`.
    """

    def __init__(self, decisions):
        self.decisions = decisions

    def _mask(self, choice, dtype):
        """Returns 1 where a token fills a slot, else 0: <dtype>[group, tokens, expert, capacity]."""
        expert = ops.one_hot(self.decisions.expert_index[:, :, choice], self.decisions.num_experts, dtype=dtype)
        # A dropped token's slot is `capacity`, so its one-hot row is zero.
        slot = ops.one_hot(self.decisions.slot[:, :, choice], self.decisions.capacity, dtype=dtype)
        mask = ops.expand_dims(expert, -1) * ops.expand_dims(slot, -2)
        return partitioning.constrain(mask, ("group", None, None, "capacity"))

    def run(self, experts, tokens, training):
        """Applies the experts: <compute dtype>[group, tokens, d_model] -> <float32>, same shape."""
        return self.combine(_on_experts(experts, self.dispatch(tokens), training))

    @_named("dispatch")
    def dispatch(self, tokens):
        """Fills the experts' buffers: [group, tokens, d_model] -> [expert, group, capacity, d_model]."""
        num_choices = self.decisions.slot.shape[-1]
        mask = sum(self._mask(choice, tokens.dtype) for choice in range(num_choices))
        return ops.einsum("gsec,gsm->egcm", mask, tokens)

    @_named("combine")
    def combine(self, outputs):
        """Sums gated outputs by token: [expert, group, capacity, d_model] -> <float32>[group, tokens, d_model]."""
        combined = 0.0
        for choice in range(self.decisions.slot.shape[-1]):
            own = ops.einsum("gsec,egcm->gsm", self._mask(choice, outputs.dtype), outputs)
            combined = combined + _gated(own, self.decisions.gate[:, :, choice:choice + 1])
        return combined


class Index:
    """Dispatches and combines by gathers. See `Einsum` for the arguments."""

    def __init__(self, decisions):
        num_groups, group_tokens = ops.shape(decisions.slot)[:2]
        self.num_choices = decisions.slot.shape[-1]
        self.gate = decisions.gate
        self.shape = (decisions.num_experts, num_groups, decisions.capacity)
        num_rows = num_groups * group_tokens * self.num_choices
        # [group, tokens, choice]: <int32>, the buffer's row of each choice
        group = ops.reshape(ops.arange(num_groups, dtype="int32"), (-1, 1, 1))
        buffer_row, num_buffer_rows = self._buffer_rows(decisions, decisions.expert_index * num_groups + group)
        buffer_row = ops.where(decisions.is_filled, buffer_row, num_buffer_rows)
        # [token, choice]. Choices without a slot have one past the last row.
        self.row_of_choice = ops.reshape(buffer_row, (-1, self.num_choices))
        # The only scatter, of integers: the choice that fills each row, `num_rows` for empty rows.
        filled = ops.scatter(ops.reshape(buffer_row, (-1, 1)), ops.arange(1, num_rows + 1, dtype="int32"),
                             (num_buffer_rows + 1,))[:num_buffer_rows]
        self.choice_of_row = ops.where(filled > 0, filled - 1, num_rows)
        self.token_of_row = self.choice_of_row // self.num_choices

    def _buffer_rows(self, decisions, queue):
        """Returns each choice's row, from its buffer's index expert * groups + group, and the number of rows."""
        num_experts, num_groups, expert_capacity = self.shape
        return queue * expert_capacity + decisions.slot, num_experts * num_groups * expert_capacity

    def run(self, experts, tokens, training):
        """Applies the experts: <compute dtype>[group, tokens, d_model] -> <float32>, same shape."""
        return self.combine(_on_experts(experts, self.dispatch(tokens), training))

    def dispatch(self, tokens):
        """Fills the experts' buffers: [group, tokens, d_model] -> [expert, group, capacity, d_model]."""
        return ops.reshape(self._rows(tokens), (*self.shape, tokens.shape[-1]))

    @_named("dispatch")
    def _rows(self, tokens):
        rows = ops.reshape(tokens, (-1, tokens.shape[-1]))
        back = [self.row_of_choice[:, choice] for choice in range(self.num_choices)]
        return _move(rows, [self.token_of_row], back, self._read)

    @_named("combine")
    def combine(self, outputs):
        """Sums gated outputs by token: the buffers' shape -> <float32>[group, tokens, d_model]."""
        d_model = outputs.shape[-1]
        num_groups, group_tokens = ops.shape(self.gate)[:2]
        rows = ops.reshape(outputs, (-1, d_model))
        own = _move(rows, [ops.reshape(self.row_of_choice, (-1,))], [self.choice_of_row], self._read)
        own = ops.reshape(own, (num_groups, group_tokens, self.num_choices, d_model))
        gated = _gated(own, ops.expand_dims(self.gate, -1))
        return ops.squeeze(gated, 2) if self.num_choices == 1 else ops.sum(gated, axis=2)

    def _read(self, rows, index):
        return _read(rows, index)


class Ragged(Index):
    """Dispatches by gathers to rows without empty slots, expert by expert. See `Einsum` for the arguments.

    The number of rows per expert depends on values, so XLA cannot compile it.
    """

    def __init__(self, decisions):
        if "ragged" not in forms.suited_dispatches():
            raise Refusal("dispatch='ragged' needs shapes that depend on values, as TensorFlow has them on CPU "
                          "without XLA; elsewhere use dispatch='index'.")
        super().__init__(decisions)
        # One row more than choices, so the last is always empty: choices without a row read its zeros. Other empty
        # rows are never read, and their contents are arbitrary.
        self.choice_of_row = ops.append(self.choice_of_row, 0) % ops.size(self.row_of_choice)
        self.token_of_row = self.choice_of_row // self.num_choices

    def _buffer_rows(self, decisions, queue):
        num_experts, num_groups, _ = self.shape
        is_kept = ops.cast(decisions.is_filled, "int32")
        lengths = ops.segment_sum(ops.reshape(is_kept, (-1,)), ops.reshape(queue, (-1,)),
                                  num_segments=num_experts * num_groups)
        starts = ops.cumsum(lengths) - lengths
        self._rows_of_expert = ops.sum(ops.reshape(lengths, (num_experts, num_groups)), axis=1)
        self._group = ops.take(random.batch_positions(num_groups), queue % num_groups)
        self._place = decisions.slot * num_experts + decisions.expert_index
        return ops.take(starts, queue) + decisions.slot, num_groups * ops.shape(queue)[1] * self.num_choices

    def run(self, experts, tokens, training):
        """Applies the experts: <compute dtype>[group, tokens, d_model] -> <float32>, same shape."""
        group, place = (ops.take(x, self.choice_of_row) for x in (self._group, self._place))
        ragged = RaggedRows(self._rows_of_expert, group, place)
        return self.combine(experts(self._rows(tokens), ragged=ragged, training=training))

    def _read(self, rows, index):
        return ops.take(rows, index, axis=0)


class Gather:
    """Looks up the kernels of each token, to predict a few tokens. See `Einsum` for the arguments."""

    def __init__(self, decisions):
        self.decisions = decisions

    def run(self, experts, tokens, training):
        """Applies the experts: <compute dtype>[group, tokens, d_model] -> <float32>, same shape."""
        num_groups, num_tokens, num_choices = ops.shape(self.decisions.slot)
        rows = ops.reshape(ops.repeat(tokens, num_choices, axis=1), (-1, tokens.shape[-1]))
        outputs = experts(rows, expert_index=ops.reshape(self.decisions.expert_index, (-1,)), training=training)
        outputs = ops.reshape(outputs, (num_groups, num_tokens, num_choices, outputs.shape[-1]))
        return ops.sum(_gated(outputs, ops.expand_dims(self.decisions.gate, -1)), axis=2)


class EinsumOfExperts:
    """`Einsum` for experts that choose.

    Args:
        choices: `decisions.ExpertChoices`.
    """

    def __init__(self, choices):
        self.choices = choices

    def _mask(self, num_tokens, dtype):
        """Returns 1 where a token fills a slot, else 0: <dtype>[group, tokens, expert, capacity]."""
        mask = ops.one_hot(self.choices.token_index, num_tokens, axis=1, dtype=dtype)
        return partitioning.constrain(mask, ("group", None, None, "capacity"))

    def run(self, experts, tokens, training):
        """Applies the experts: <compute dtype>[group, tokens, d_model] -> <float32>, same shape."""
        with keras.name_scope("dispatch"):
            buffers = ops.einsum("gsec,gsm->egcm", self._mask(ops.shape(tokens)[1], tokens.dtype), tokens)
        outputs = _on_experts(experts, buffers, training)
        with keras.name_scope("combine"):
            outputs = _gated(outputs, _by_expert(self.choices.gate))
            return ops.einsum("gsec,egcm->gsm", self._mask(ops.shape(tokens)[1], outputs.dtype), outputs)


class IndexOfExperts:
    """`Index` for experts that choose: combines by a segment sum. See `EinsumOfExperts` for the arguments."""

    def __init__(self, choices):
        self.choices = choices

    def run(self, experts, tokens, training):
        """Applies the experts: <compute dtype>[group, tokens, d_model] -> <float32>, same shape."""
        num_groups, num_tokens, d_model = ops.shape(tokens)
        # Token of each slot, counted over all groups. Empty slots have one past the last token.
        group = ops.arange(num_groups, dtype="int32")[:, None, None]
        token = self.choices.token_index
        token = ops.where(token < num_tokens, token + group * num_tokens, num_groups * num_tokens)
        token = ops.transpose(token, (1, 0, 2))
        flat = ops.reshape(token, (-1,))
        with keras.name_scope("dispatch"):
            rows = _gather(ops.reshape(tokens, (-1, d_model)), flat, num_groups * num_tokens)
            buffers = ops.reshape(rows, (*ops.shape(token), d_model))
        outputs = _on_experts(experts, buffers, training)
        with keras.name_scope("combine"):
            outputs = _gated(outputs, _by_expert(self.choices.gate))
            summed = _sum_rows(ops.reshape(outputs, (-1, d_model)), flat, num_groups * num_tokens)
            return ops.reshape(summed, ops.shape(tokens))


def _on_experts(experts, buffers, training):
    # An all-to-all moves buffers from groups to experts, and another one back. If `expert_embed` is split, devices that
    # share experts send a part of every row each, as in Mesh TensorFlow and T5X, instead of the same rows.
    for axes in (AT_GROUPS, AT_EXPERTS, READ_BY_EXPERTS):
        buffers = partitioning.constrain(buffers, axes)
    outputs = experts(buffers, training=training)
    for axes in (AT_EXPERTS, AT_GROUPS):
        outputs = partitioning.constrain(outputs, axes)
    return outputs


def _gated(outputs, gate):
    """Multiplies <compute dtype> outputs by <float32> gates in float32. Shapes broadcast."""
    outputs = dtypes.widen(outputs)
    return outputs * ops.cast(gate, outputs.dtype)


def _by_expert(gate):
    """[group, expert, capacity] -> [expert, group, capacity, 1]"""
    return ops.transpose(gate, (1, 0, 2))[..., None]


def _move(rows, there, back, read):
    """Sums rows read at each index in `there`. The gradient sums upstream rows read at each index in `back`."""
    return _with_gradient(lambda rows: sum(read(rows, index) for index in there),
                          lambda upstream: sum(read(upstream, index) for index in back), rows)


def _gather(rows, index, num_rows):
    """Gathers rows. The gradient is a segment sum."""
    return _with_gradient(lambda rows: _read(rows, index), lambda upstream: _add_up(upstream, index, num_rows), rows)


def _sum_rows(rows, index, num_rows):
    """Sums rows with the same index, which is at most `num_rows`. The gradient is a gather."""
    return _with_gradient(lambda rows: _add_up(rows, index, num_rows), lambda upstream: _read(upstream, index), rows)


def _read(rows, index):
    """Gathers rows. The index one past the last row reads zeros."""
    return ops.take(ops.concatenate([rows, ops.zeros((1, rows.shape[-1]), rows.dtype)], axis=0), index, axis=0)


def _add_up(rows, index, num_rows):
    # In float32: a token may be in a slot of every expert.
    added = ops.segment_sum(dtypes.widen(rows), index, num_segments=num_rows + 1)[:num_rows]
    return ops.cast(added, rows.dtype)


def _with_gradient(forward, backward, rows):
    @ops.custom_gradient
    def move(rows):
        def gradient(*args, upstream=None):
            (upstream,) = args if upstream is None else (upstream,)
            return backward(upstream)

        return forward(rows), gradient

    return move(rows)
