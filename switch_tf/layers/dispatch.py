"""Dispatch of tokens to experts and combination of their outputs, in forms with equal results."""

import functools
from collections.abc import Callable
from typing import Any

import keras
from keras import ops

from switch_tf import context, partitioning
from switch_tf.layers.basic import drop
from switch_tf.layers.decisions import ExpertChoices, TokenChoices
from switch_tf.layers.feed_forward import ExpertFeedForward
from switch_tf.ops import dtypes, forms, products, random
from switch_tf.partitioning.tensors import Tensor
from switch_tf.refusals import Refusal

# Axes of the slot buffers.
AT_GROUPS = (None, "group", "capacity", "expert_embed")
AT_EXPERTS = ("expert", "group", "capacity", "expert_embed")
READ_BY_EXPERTS = ("expert", "group", "capacity", "embed")
# Overhead of one product per expert, in rows (docs/benchmarks.md).
ROWS_PER_PRODUCT = 40
# Most rows for `Gathered`: two choices for each row that `decoding` compiles.
GATHERED_ROWS = 16


class Dispatcher:
    """Moves tokens to their experts and sums the gated outputs. `dispatch` and `combine` are pure functions.

    Shapes:
        tokens: <compute dtype>[group, tokens, d_model].
        buffers: <compute dtype>[expert, group, capacity, d_model], one row per slot, zeros in empty slots. Forms
            without buffers have <compute dtype>[row, d_model] and override `compute`.
        outputs: <compute dtype>, the shape of the buffers with last dimension output_dim.
        combined: <float32>[group, tokens, output_dim], zeros for dropped tokens.
    """

    dispatch: Callable[[Tensor], Tensor]
    combine: Callable[[Tensor], Tensor]

    def __init__(self, decisions: TokenChoices | ExpertChoices):
        self.decisions: Any = decisions

    def compute(self, experts: ExpertFeedForward, buffers: Tensor, training: bool) -> Tensor:
        """Applies the experts: buffers -> outputs, with an all-to-all before and after.

        If `expert_embed` is split, devices that share experts send different parts of each row (Mesh TensorFlow, T5X),
        not equal rows.
        """
        for axes in (AT_GROUPS, AT_EXPERTS, READ_BY_EXPERTS):
            buffers = partitioning.constrain(buffers, axes)
        outputs = experts(buffers, training=training)
        for axes in (AT_EXPERTS, AT_GROUPS):
            outputs = partitioning.constrain(outputs, axes)
        return outputs

    def run(self, experts: ExpertFeedForward, tokens: Tensor, training: bool) -> Tensor:
        """Dispatches, applies the experts and combines: tokens -> combined."""
        # `aot` attributes time to these scopes.
        with keras.name_scope("dispatch"):
            buffers = self.dispatch(tokens)
        outputs = self.compute(experts, buffers, training)
        with keras.name_scope("combine"):
            return self.combine(outputs)


def _gated(outputs, gate):
    outputs = dtypes.widen(outputs)
    return outputs * ops.cast(gate, outputs.dtype)


def _sum_choices(outputs, gate):
    """Sums by token: [token * choice, width], <float32>[group, tokens, choice] -> combined."""
    num_choices = gate.shape[-1]
    outputs = ops.reshape(outputs, (*ops.shape(gate)[:2], num_choices, outputs.shape[-1]))
    outputs = _gated(outputs, ops.expand_dims(gate, -1))
    return ops.squeeze(outputs, 2) if num_choices == 1 else ops.sum(outputs, axis=2)


def _define_gradient(forward, backward, rows):
    return ops.custom_gradient(lambda rows: (forward(rows), backward))(rows)


def _read_or_zero(rows, index):
    """Gathers rows. One index past the last reads zeros."""
    return ops.take(ops.concatenate([rows, ops.zeros((1, rows.shape[-1]), rows.dtype)], axis=0), index, axis=0)


class Einsum(Dispatcher):
    """Dispatches TokenChoices by products with one-hot masks, as GShard (arXiv 2006.16668, section 3.1).

    TPU partitioners turn each product into one all-to-all. Cost grows with tokens times slots.
    """

    def dispatch(self, tokens: Tensor) -> Tensor:
        first, *masks = self._masks(tokens.dtype)
        return ops.einsum("gsec,gsm->egcm", sum(masks, first), tokens)

    def combine(self, outputs: Tensor) -> Tensor:
        return sum(_gated(ops.einsum("gsec,egcm->gsm", mask, outputs), self.decisions.gate[:, :, choice:choice + 1])
                   for choice, mask in enumerate(self._masks(outputs.dtype)))

    def _masks(self, dtype):
        """Yields <dtype>[group, tokens, expert, capacity] for each choice: 1 where a token fills a slot."""
        for choice in range(self.decisions.slot.shape[-1]):
            expert = ops.one_hot(self.decisions.expert_index[:, :, choice], self.decisions.num_experts, dtype=dtype)
            # A dropped token's one-hot row is zero.
            slot = ops.one_hot(self.decisions.slot[:, :, choice], self.decisions.capacity, dtype=dtype)
            mask = ops.expand_dims(expert, -1) * ops.expand_dims(slot, -2)
            yield partitioning.constrain(mask, ("group", None, None, "capacity"))


class Index(Dispatcher):
    """Dispatches TokenChoices by gathers in both directions. Cost and memory grow with tokens.

    The maps between kept choices and rows are inverse, so the gradient of a gather is a gather by the inverse map.
    """

    read = staticmethod(_read_or_zero)

    def __init__(self, decisions: TokenChoices):
        super().__init__(decisions)
        num_groups = ops.shape(decisions.slot)[0]
        group = ops.reshape(ops.arange(num_groups, dtype="int32"), (-1, 1, 1))
        self._map_rows(decisions.expert_index * num_groups + group, num_groups)

    def _map_rows(self, buffer, num_groups):
        """`buffer`: <int32>[group, tokens, choice], expert * groups + group."""
        num_experts, capacity = self.decisions.num_experts, self.decisions.capacity
        self._buffer_shape = (num_experts, num_groups, capacity)
        self._fill_rows(buffer * capacity + self.decisions.slot, num_experts * num_groups * capacity)

    def _fill_rows(self, row, num_rows):
        """Computes `_row_of_choice`, <int32>[token, choice], and `_choice_of_row`, <int32>[row].

        A choice without a row maps to `num_rows`, an empty row to the number of all choices.
        """
        num_groups, group_tokens, num_choices = ops.shape(row)
        all_choices = num_groups * group_tokens * num_choices
        row = ops.where(self.decisions.is_filled, row, num_rows)
        # The only scatter: the number, from 1, of the choice in each row.
        filled = ops.scatter(ops.reshape(row, (-1, 1)), ops.arange(1, all_choices + 1, dtype="int32"),
                             (num_rows + 1,))[:num_rows]
        self._choice_of_row = ops.where(filled > 0, filled - 1, all_choices)
        self._row_of_choice = ops.reshape(row, (-1, num_choices))

    def _move(self, rows, there, back):
        """Sums rows read at each index in `there`. The gradient reads upstream rows at each index in `back`."""
        return _define_gradient(lambda rows: sum(self.read(rows, index) for index in there),
                                lambda upstream: sum(self.read(upstream, index) for index in back), rows)

    def dispatch(self, tokens: Tensor) -> Tensor:
        num_choices, width = self._row_of_choice.shape[-1], tokens.shape[-1]
        rows = self._move(ops.reshape(tokens, (-1, width)), [self._choice_of_row // num_choices],
                          [self._row_of_choice[:, choice] for choice in range(num_choices)])
        return ops.reshape(rows, (*self._buffer_shape, width))

    def combine(self, outputs: Tensor) -> Tensor:
        rows = ops.reshape(outputs, (-1, outputs.shape[-1]))
        rows = self._move(rows, [ops.reshape(self._row_of_choice, (-1,))], [self._choice_of_row])
        return _sum_choices(rows, self.decisions.gate)


class Ragged(Index):
    """Dispatches TokenChoices by gathers to rows sorted by expert. Fastest for few experts on CPU.

    Rows per expert depend on values, so XLA cannot compile it. Buffers are [group * tokens * choice + 1, d_model]. The
    last row is always empty: choices without a row read its zeros. Other empty rows are never read.
    """

    read = staticmethod(functools.partial(ops.take, axis=0))
    _buffer_shape = (-1,)

    def _map_rows(self, buffer, num_groups):
        if "ragged" not in forms.suited_dispatches():
            raise Refusal("dispatch='ragged' needs shapes that depend on values, as TensorFlow has them on CPU "
                          "without XLA; elsewhere use dispatch='index'.")
        decisions, num_experts = self.decisions, self.decisions.num_experts
        _, group_tokens, num_choices = ops.shape(buffer)
        lengths = ops.segment_sum(ops.reshape(ops.cast(decisions.is_filled, "int32"), (-1,)),
                                  ops.reshape(buffer, (-1,)), num_segments=num_experts * num_groups)
        starts = ops.cumsum(lengths) - lengths
        self._fill_rows(ops.take(starts, buffer) + decisions.slot, num_groups * group_tokens * num_choices)
        # One more row, always empty. Any valid index does for empty rows.
        self._choice_of_row = ops.append(self._choice_of_row, 0) % ops.size(self._row_of_choice)
        # <int32>[expert], and the group and place of each row for `dropout_draws`.
        self._lengths = ops.sum(ops.reshape(lengths, (num_experts, num_groups)), axis=1)
        group = ops.take(random.batch_positions(num_groups), buffer % num_groups)
        self._group = ops.take(group, self._choice_of_row)
        self._place = ops.take(decisions.slot * num_experts + decisions.expert_index, self._choice_of_row)

    def compute(self, experts: ExpertFeedForward, buffers: Tensor, training: bool) -> Tensor:
        """Applies each expert to its rows. Empty rows get zeros.

        At inference, skips experts without rows if rows are fewer than experts or of unknown number.
        """
        with keras.name_scope(experts.name):
            num_rows, num_experts, lengths = buffers.shape[0], experts.num_experts, self._lengths
            kernels = (*experts.input_kernels, experts.wo)
            if not training and num_rows is None:
                outputs = [self._compute_in_a_loop(experts, buffers)]
            else:
                if not training and num_rows < num_experts:
                    # One row is empty. top_k is stable: experts with rows come first, in the order of their rows.
                    busy = ops.top_k(ops.cast(lengths > 0, "int32"), num_rows - 1)[1]
                    lengths = ops.take(lengths, busy)
                    kernels = [_slices(kernel, busy, buffers.dtype) for kernel in kernels]
                else:
                    kernels = [ops.unstack(ops.cast(kernel, buffers.dtype), num_experts) for kernel in kernels]
                hidden = [experts.activate([ops.matmul(part, wi) for wi in parts])
                          for part, *parts in zip(_split(buffers, lengths), *kernels[:-1], strict=True)]
                if training and experts.dropout_rate:
                    draws = _split(experts.dropout_draws(self._group[:, None], self._place[:, None]), lengths)
                    hidden = [drop(part, draw, experts.dropout_rate) for part, draw in zip(hidden, draws, strict=True)]
                outputs = list(map(ops.matmul, hidden, kernels[-1]))
            num_empty = ops.shape(buffers)[0] - ops.sum(self._lengths)
            return ops.concatenate([*outputs, ops.zeros((num_empty, experts.wo.shape[-1]), outputs[-1].dtype)], axis=0)

    def _compute_in_a_loop(self, experts, rows):
        lengths = self._lengths
        busy = ops.nonzero(lengths > 0)[0]
        starts = ops.cumsum(lengths) - lengths

        def turn(index, outputs):
            expert = busy[index][None]
            start, length = ops.take(starts, expert)[0], ops.take(lengths, expert)[0]
            part = ops.slice(rows, (start, 0), (length, rows.shape[-1]))
            hidden = experts.activate([ops.matmul(part, *_slices(wi, expert, rows.dtype))
                                       for wi in experts.input_kernels])
            part = ops.matmul(hidden, *_slices(experts.wo, expert, rows.dtype))
            return index + 1, ops.concatenate([outputs, part], axis=0)

        first = ops.convert_to_tensor(0, "int32"), ops.zeros((0 * ops.sum(lengths), experts.wo.shape[-1]), rows.dtype)
        return ops.while_loop(lambda index, _: index < ops.size(busy), turn, first)[1]


def _slices(kernel, indices, dtype):
    """Slices whole [d_model, d_ff] entries, in TensorFlow without a copy."""
    value = ops.convert_to_tensor(kernel)
    return [ops.cast(ops.squeeze(ops.slice(value, (index, 0, 0), (1, *kernel.shape[1:])), 0), dtype)
            for index in ops.unstack(indices, indices.shape[0])]


def _split(rows, lengths):
    count = lengths.shape[0]

    @ops.custom_gradient
    def split(rows):
        ends = ops.cumsum(lengths)
        pieces = [ops.slice(rows, (ends[i] - lengths[i], 0), (lengths[i], rows.shape[-1])) for i in range(count)]

        def gradient(*upstream):
            # Otherwise each slice's gradient would be a tensor of all rows.
            num_left = ops.shape(rows)[0] - ends[-1]
            return ops.concatenate([*upstream, ops.zeros((num_left, rows.shape[-1]), rows.dtype)], axis=0)

        return pieces, gradient

    return split(rows)


class Gathered(Dispatcher):
    """Computes each choice of TokenChoices as its own row, to predict few tokens with static shapes.

    Each row looks up the kernels of its expert.
    """

    def dispatch(self, tokens: Tensor) -> Tensor:
        num_choices = self.decisions.slot.shape[-1]
        return ops.reshape(ops.repeat(tokens, num_choices, axis=1), (-1, tokens.shape[-1]))

    def compute(self, experts: ExpertFeedForward, buffers: Tensor, training: bool) -> Tensor:
        if training:
            raise Refusal("Kernels are gathered for prediction alone; train with dispatch='index' or 'einsum'.")
        expert_index = ops.reshape(self.decisions.expert_index, (-1,))

        def times(rows, kernels):
            return products.multiply_in_blocks(rows, partitioning.use(kernels, kernels.dtype),
                                               lambda part: ops.take(part, expert_index, axis=0))

        with keras.name_scope(experts.name):
            return times(experts.activate([times(buffers, wi) for wi in experts.input_kernels]), experts.wo)

    def combine(self, outputs: Tensor) -> Tensor:
        return _sum_choices(outputs, self.decisions.gate)


class ExpertChoiceEinsum(Einsum):
    """Dispatches ExpertChoices by products with masks."""

    def combine(self, outputs: Tensor) -> Tensor:
        outputs = _gated(outputs, self.decisions.gate_of_slot)
        return ops.einsum("gsec,egcm->gsm", next(self._masks(outputs.dtype)), outputs)

    def _masks(self, dtype):
        # An empty slot's one-hot row is zero.
        mask = ops.one_hot(self.decisions.token_index, self.decisions.num_tokens, axis=1, dtype=dtype)
        yield partitioning.constrain(mask, ("group", None, None, "capacity"))


class ExpertChoiceIndex(Dispatcher):
    """Dispatches ExpertChoices by a gather, and combines by a segment sum. Each is the other's gradient."""

    def __init__(self, decisions: ExpertChoices):
        super().__init__(decisions)
        num_groups, num_tokens = ops.shape(decisions.token_index)[0], decisions.num_tokens
        group = ops.arange(num_groups, dtype="int32")[:, None, None]
        self._all_tokens = num_groups * num_tokens
        # <int32>[expert, group, capacity] over all groups. Empty slots have the number of all tokens.
        token = ops.where(decisions.token_index < num_tokens, decisions.token_index + group * num_tokens,
                          self._all_tokens)
        self._token = ops.transpose(token, (1, 0, 2))
        self._index = ops.reshape(self._token, (-1,))

    def _read(self, rows):
        return _read_or_zero(rows, self._index)

    def _sum(self, rows):
        # In float32: a token may be in a slot of every expert.
        summed = ops.segment_sum(dtypes.widen(rows), self._index, num_segments=self._all_tokens + 1)
        return ops.cast(summed[:self._all_tokens], rows.dtype)

    def dispatch(self, tokens: Tensor) -> Tensor:
        width = tokens.shape[-1]
        rows = _define_gradient(self._read, self._sum, ops.reshape(tokens, (-1, width)))
        return ops.reshape(rows, (*ops.shape(self._token), width))

    def combine(self, outputs: Tensor) -> Tensor:
        outputs = _gated(outputs, self.decisions.gate_of_slot)
        width = outputs.shape[-1]
        summed = _define_gradient(self._sum, self._read, ops.reshape(outputs, (-1, width)))
        return ops.reshape(summed, (-1, self.decisions.num_tokens, width))


def create(decisions: TokenChoices | ExpertChoices, dispatch: str = "auto") -> Dispatcher:
    """Returns the dispatcher for a router's decisions.

    Args:
        dispatch: "einsum", "index", "ragged" (for TokenChoices only), or "auto" for the fastest.
    """
    name = fastest(decisions) if dispatch == "auto" else dispatch
    if isinstance(decisions, TokenChoices):
        return {"einsum": Einsum, "index": Index, "ragged": Ragged, "gathered": Gathered}[name](decisions)
    if name == "ragged":
        raise Refusal("dispatch='ragged' leaves out empty slots, and where experts choose there are none; "
                      "use 'index' or 'auto'.")
    return ExpertChoiceIndex(decisions) if name == "index" else ExpertChoiceEinsum(decisions)


def fastest(decisions: TokenChoices | ExpertChoices) -> str:
    """Returns the name of the fastest dispatch on the current device."""
    first, *fallbacks = forms.suited_dispatches()
    if isinstance(decisions, ExpertChoices):
        # No slots are empty, so "ragged" has no advantage.
        return next(name for name in (first, *fallbacks) if name != "ragged")
    num_groups, num_tokens, num_choices = decisions.slot.shape
    no_drop = context.current().no_drop
    if first != "ragged":
        # Buffers would have a row for every expert and sequence.
        is_step = no_drop and num_tokens == 1 and isinstance(num_groups, int)
        is_gathered = is_step and num_groups * num_choices <= GATHERED_ROWS and not partitioning.is_partitioned()
        return "gathered" if is_gathered else first
    if not all(isinstance(size, int) for size in (num_groups, num_tokens, decisions.capacity)):
        # Without drops, nearly all slots are empty.
        return "ragged" if no_drop else fallbacks[0]
    num_rows = num_groups * num_tokens * num_choices
    # In a decoding step, or with fewer choices than experts, reading kernels dominates.
    is_ragged = num_tokens == 1 or num_rows < decisions.num_experts or (
        num_rows + decisions.num_experts * ROWS_PER_PRODUCT < decisions.num_experts * num_groups * decisions.capacity)
    return "ragged" if is_ragged else fallbacks[0]
