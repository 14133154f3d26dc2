"""Creation of dispatchers by name, and the fastest one for a device and load."""

from switch_tf import context, partitioning
from switch_tf.configs.choices import DISPATCHES, check_choice
from switch_tf.layers.decisions import ExpertChoices, TokenChoices
from switch_tf.layers.dispatch.base import Dispatcher
from switch_tf.layers.dispatch.einsum import Einsum, ExpertChoiceEinsum
from switch_tf.layers.dispatch.gathered import Gathered
from switch_tf.layers.dispatch.index import ExpertChoiceIndex, Index
from switch_tf.layers.dispatch.ragged import Ragged
from switch_tf.ops import forms
from switch_tf.refusals import Refusal

# Overhead of one product per expert, in rows (docs/benchmarks.md).
ROWS_PER_PRODUCT = 40
# Most rows for `Gathered`: two choices for each row of the largest batch that `decoding.loop` compiles by XLA.
GATHERED_ROWS = 16

_FOR_TOKENS: dict[str, type[Dispatcher]] = {"einsum": Einsum, "index": Index, "ragged": Ragged, "gathered": Gathered}
_FOR_EXPERTS: dict[str, type[Dispatcher]] = {"einsum": ExpertChoiceEinsum, "index": ExpertChoiceIndex}


def create(decisions: TokenChoices | ExpertChoices, dispatch: str = "auto") -> Dispatcher:
    """Returns the dispatcher for a router's decisions.

    Args:
        decisions: TokenChoices or ExpertChoices.
        dispatch: "einsum", "index", "ragged" (for TokenChoices only), or "auto" for the fastest one.

    Raises:
        Refusal: The name is unknown, or the form does not fit the decisions or the device.
    """
    check_choice("dispatch", dispatch, DISPATCHES)
    experts_choose = isinstance(decisions, ExpertChoices)
    if experts_choose and dispatch == "ragged":
        raise Refusal("dispatch='ragged' leaves out empty slots, and where experts choose there are none; "
                      "use 'index' or 'auto'.")
    name = fastest(decisions) if dispatch == "auto" else dispatch
    return (_FOR_EXPERTS if experts_choose else _FOR_TOKENS)[name](decisions)


def fastest(decisions: TokenChoices | ExpertChoices) -> str:
    """Returns the name of the fastest dispatch of the decisions on the current device."""
    first, *others = forms.suited_dispatches()
    if isinstance(decisions, ExpertChoices):
        # No slots are empty, so leaving them out gains nothing.
        return next(name for name in (first, *others) if name != "ragged")
    num_groups, num_tokens, num_choices = decisions.slot.shape
    if first != "ragged":
        # A decoding step of a few sequences: buffers would have a row for every expert and sequence.
        is_step = context.current().no_drop and num_tokens == 1 and isinstance(num_groups, int)
        is_gathered = is_step and num_groups * num_choices <= GATHERED_ROWS and not partitioning.is_partitioned()
        return "gathered" if is_gathered else first
    if not all(isinstance(size, int) for size in (num_groups, num_tokens, decisions.capacity)):
        # Without drops, nearly all slots are empty.
        return "ragged" if context.current().no_drop else others[0]
    # A decoding step, or fewer choices than experts: most slots are empty, and reading kernels takes most of the time.
    if num_tokens == 1 or num_groups * num_tokens * num_choices < decisions.num_experts:
        return "ragged"
    ragged_rows = num_groups * num_tokens * num_choices + decisions.num_experts * ROWS_PER_PRODUCT
    return "ragged" if ragged_rows < decisions.num_experts * num_groups * decisions.capacity else others[0]
