"""The state of Adafactor for an upcycled model: that of the dense model, for each expert a copy."""

import numpy as np

from switch_tf import partitioning
from switch_tf.conversion.weight_source import variables_of
from switch_tf.models.switch_transformer import SwitchTransformer
from switch_tf.optim.adafactor import Adafactor
from switch_tf.optim.factoring import factor_dimensions, slot_dimensions
from switch_tf.surgery.upcycling import Origin


def upcycled(dense: SwitchTransformer, optimizer: Adafactor, sparse: SwitchTransformer) -> Adafactor:
    """Returns an Adafactor of an upcycled model, at the step of the dense model's.

    Experts that are narrower than the dense layer have their part of the means over its rows, and all of the means over
    its hidden units, as if the parts had equal gradients. The slots of the routers are new.

    Args:
        dense: SwitchTransformer without experts, built.
        optimizer: Its Adafactor, built.
        sparse: The upcycled model.
    """
    made, config = Adafactor(), sparse.config
    made.build(sparse.trainable_variables)
    made.iterations.assign(optimizer.iterations)
    old, new = variables_of(dense), variables_of(sparse)
    for name, variable in new.items():
        origin = Origin.of(name, config)
        if origin.dense is None:
            continue
        slots = optimizer.slots_of(old[origin.dense])
        if origin.layer is None:
            values = {slot: array.numpy() for slot, array in slots.items()}
        else:
            values = _of_experts(old[origin.dense], slots, origin.hidden_axis, config)
        for slot, array in made.slots_of(variable).items():
            array.assign(values[slot])
    return made


def _of_experts(kernel, slots, hidden_axis, config):
    """Returns name of a slot -> <float>[num_experts, ...], from the slots of a dense kernel."""
    kept = slot_dimensions(kernel.shape, factor_dimensions(kernel.shape, partitioning.axes_of(kernel)))
    num_slices = kernel.shape[hidden_axis] // config.expert_width
    made = {}
    for name, dims in kept.items():
        values = slots[name].numpy()
        parts = ([values] * num_slices if hidden_axis not in dims
                 else np.split(values, num_slices, axis=dims.index(hidden_axis)))
        made[name] = np.stack([parts[expert % num_slices] for expert in range(config.num_experts)])
    return made
