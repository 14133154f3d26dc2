"""Carries tokens to the slots their router chose and the experts' outputs back: four ways, the same numbers.

`Einsum` is GShard's form (section 3.1 there): products with one-hot masks, which TPU partitioners turn into one
all-to-all each way; its cost grows with tokens times slots. `Index` moves rows by index. On the tokens that were kept,
the maps from slot to token and from token to slot are inverse, so the gradient of each gather is the other gather: no
scatter of rows, and cost and memory grow with tokens. `Ragged` moves them so too, but leaves no empty slots between
them: the experts compute what is there, one after the other. It is the fastest where experts are few, on CPU. `Gather`
moves no row: it looks up each one's kernels, for a step of decoding a few sequences where shapes must be known.

Where experts choose, a token may lie in many slots, and the way back is a sum over segments instead of a gather.
"""

import functools

import keras
from keras import ops

from switch_tf import partitioning
from switch_tf.layers import grouping
from switch_tf.layers.ragged import RaggedRows
from switch_tf.ops import dtypes, forms, random
from switch_tf.refusals import Refusal

# The buffers of slots: where the groups are, where the experts are, and as an expert reads them.
AT_GROUPS = (None, "group", "capacity", "expert_embed")
AT_EXPERTS = ("expert", "group", "capacity", "expert_embed")
READ_BY_EXPERTS = ("expert", "group", "capacity", "embed")
# Computing an expert's rows by themselves costs about as much as so many rows more (docs/benchmarks.md).
ROWS_PER_PRODUCT = 40
# Up to so many rows have their kernels looked up for each of them: two choices of what `decoding.loop` has XLA compile.
LOOKED_UP_ROWS = 16


def _named(name):
    """Gives a method's operations a scope, by which a compiled program's time is told apart (`aot.origin`)."""

    def decorate(method):
        @functools.wraps(method)
        def scoped(*args):
            with keras.name_scope(name):
                return method(*args)

        return scoped

    return decorate


def best(decisions) -> str:
    """The name of the fastest dispatch for the device and the load of `TokenChoices`."""
    first, *others = forms.suited_dispatches()
    num_groups, num_tokens, num_choices = decisions.slot.shape
    if first != "ragged":
        # A step of decoding a few sequences: buffers would have a row of every expert for each.
        is_step = grouping.is_no_drop() and num_tokens == 1 and isinstance(num_groups, int)
        looks_up = is_step and num_groups * num_choices <= LOOKED_UP_ROWS and not partitioning.is_partitioned()
        return "gather" if looks_up else first
    if not all(isinstance(size, int) for size in (num_groups, num_tokens, decisions.capacity)):
        # With room for every token at every expert nearly all slots are empty.
        return "ragged" if grouping.is_no_drop() else others[0]
    # A step of decoding, or fewer choices than experts: most slots are empty, and reading kernels is what takes time.
    if num_tokens == 1 or num_groups * num_tokens * num_choices < decisions.num_experts:
        return "ragged"
    ragged_rows = num_groups * num_tokens * num_choices + decisions.num_experts * ROWS_PER_PRODUCT
    return "ragged" if ragged_rows < decisions.num_experts * num_groups * decisions.capacity else others[0]


def best_of_experts() -> str:
    """The name of the fastest dispatch for the device where experts choose: there are no empty slots to leave out."""
    return next(name for name in forms.suited_dispatches() if name != "ragged")


class Einsum:
    """Dispatch and combine by products with masks.

    Args:
        decisions: the router's, see `decisions.TokenChoices`.
    """

    def __init__(self, decisions):
        self.decisions = decisions

    def _mask(self, choice, dtype):
        """One where a token fills a slot, exact in any dtype: <dtype>[group, tokens, expert, capacity]."""
        expert = ops.one_hot(self.decisions.expert_index[:, :, choice], self.decisions.num_experts, dtype=dtype)
        # A dropped token's slot lies beyond the last one, and its one-hot row is zero.
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
        """Brings gated outputs back: [expert, group, capacity, d_model] -> <float32>[group, tokens, d_model]."""
        combined = 0.0
        for choice in range(self.decisions.slot.shape[-1]):
            own = ops.einsum("gsec,egcm->gsm", self._mask(choice, outputs.dtype), outputs)
            combined = combined + _gated(own, self.decisions.gate[:, :, choice:choice + 1])
        return combined


class Index:
    """Dispatch and combine by gathers in both directions; arguments as for `Einsum`."""

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
        # [token, choice], one past the last row where there is none
        self.row_of_choice = ops.reshape(buffer_row, (-1, self.num_choices))
        # Integers alone are scattered, once: which choice fills each row, `num_rows` where none does.
        filled = ops.scatter(ops.reshape(buffer_row, (-1, 1)), ops.arange(1, num_rows + 1, dtype="int32"),
                             (num_buffer_rows + 1,))[:num_buffer_rows]
        self.choice_of_row = ops.where(filled > 0, filled - 1, num_rows)
        self.token_of_row = self.choice_of_row // self.num_choices

    def _buffer_rows(self, decisions, queue):
        """Row of each choice, from the number of its queue (expert by expert, group by group), and number of rows."""
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
        """Brings gated outputs back: the buffers' shape -> <float32>[group, tokens, d_model]."""
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
    """Like `Index`, with rows for the kept tokens alone, expert by expert; arguments as for `Einsum`.

    The number of rows of an expert depends on the values, so XLA cannot compile it.
    """

    def __init__(self, decisions):
        if "ragged" not in forms.suited_dispatches():
            raise Refusal("dispatch='ragged' needs shapes that depend on values, as TensorFlow has them on CPU "
                          "without XLA; elsewhere use dispatch='index'.")
        super().__init__(decisions)
        # There is one row more than tokens can fill, so that the last is always empty; a token without a row reads its
        # zeros. Nobody reads the other empty rows, and what is moved into them may be anything.
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
    """Each token's kernels by index, for a few tokens to predict; arguments as for `Einsum`."""

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
    """`Einsum` where experts choose.

    Args:
        choices: `decisions.ExpertChoices`.
    """

    def __init__(self, choices):
        self.choices = choices

    def _mask(self, num_tokens, dtype):
        """One where a token fills a slot: <dtype>[group, tokens, expert, capacity]."""
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
    """`Index` where experts choose: gathers there, sums over segments back; `choices` as for `EinsumOfExperts`."""

    def __init__(self, choices):
        self.choices = choices

    def run(self, experts, tokens, training):
        """Applies the experts: <compute dtype>[group, tokens, d_model] -> <float32>, same shape."""
        num_groups, num_tokens, d_model = ops.shape(tokens)
        # Token of each slot in the whole part of the batch, expert by expert; one past the last where it is empty.
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
    # Between groups and experts lies the all-to-all, there and back. Where `expert_embed` is split, devices that share
    # experts each send a part of every row, rather than all of them the same (Mesh TensorFlow and T5X do it, too).
    for axes in (AT_GROUPS, AT_EXPERTS, READ_BY_EXPERTS):
        buffers = partitioning.constrain(buffers, axes)
    outputs = experts(buffers, training=training)
    for axes in (AT_EXPERTS, AT_GROUPS):
        outputs = partitioning.constrain(outputs, axes)
    return outputs


def _gated(outputs, gate):
    """Outputs times gates, in float32: <compute dtype>, <float32>, which broadcast -> <float32>."""
    outputs = dtypes.widen(outputs)
    return outputs * ops.cast(gate, outputs.dtype)


def _by_expert(gate):
    """[group, expert, capacity] -> [expert, group, capacity, 1]"""
    return ops.transpose(gate, (1, 0, 2))[..., None]


def _move(rows, there, back, read):
    """Sum of what `read` finds in `rows` by the indices `there`, whose gradient is the sum of the same by `back`."""
    return _with_gradient(lambda rows: sum(read(rows, index) for index in there),
                          lambda upstream: sum(read(upstream, index) for index in back), rows)


def _gather(rows, index, num_rows):
    """Rows by `index`; the gradient is summed over the places where a row was read."""
    return _with_gradient(lambda rows: _read(rows, index), lambda upstream: _add_up(upstream, index, num_rows), rows)


def _sum_rows(rows, index, num_rows):
    """Sums of the rows with the same `index`, below `num_rows`; the gradient is a gather."""
    return _with_gradient(lambda rows: _add_up(rows, index, num_rows), lambda upstream: _read(upstream, index), rows)


def _read(rows, index):
    """Rows by `index`; zeros for one past the last."""
    return ops.take(ops.concatenate([rows, ops.zeros((1, rows.shape[-1]), rows.dtype)], axis=0), index, axis=0)


def _add_up(rows, index, num_rows):
    # In float32: a token may be in as many slots as there are experts.
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
