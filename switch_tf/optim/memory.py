"""Bytes of a model's weights and optimizer slots, from its configuration alone."""

import math

from switch_tf.configs.switch_config import SwitchConfig
from switch_tf.optim import factoring
from switch_tf.partitioning.layout import Layout


def stored_bytes(config: SwitchConfig) -> dict[str, int]:
    """Returns the bytes of float32 weights, of Adafactor's factored slots and, to compare, of Adam's two full slots."""
    slots = sum(weight.count * factoring.num_slot_elements(weight.shape, weight.axes) for weight in config.weights())
    return {"weights": 4 * config.num_parameters, "optimizer": 4 * slots, "optimizer_adam": 8 * config.num_parameters}


def bytes_per_device(config: SwitchConfig, layout: Layout) -> dict:
    """Returns the bytes of float32 weights and Adafactor's slots that each device stores, and the `mesh`.

    Args:
        config: Configuration of the model.
        layout: Layout with a complete mesh.

    Raises:
        Refusal: The layout cannot split the model.
    """
    layout.check_sizes(config.axis_sizes)

    def num_stored(shape, axes):
        if not layout.stores_pieces:
            return math.prod(shape)
        return math.prod(layout.piece(shape, layout.spec(axes, at_rest=True)))

    weights = slots = 0
    for weight in config.weights():
        weights += weight.count * num_stored(weight.shape, weight.axes)
        factors = factoring.factor_dimensions(weight.shape, weight.axes)
        for dims in factoring.slot_dimensions(weight.shape, factors).values():
            slots += weight.count * num_stored([weight.shape[dim] for dim in dims], [weight.axes[dim] for dim in dims])
    return {"weights": 4 * weights, "optimizer_slots": 4 * slots, "total": 4 * (weights + slots), "mesh": layout.mesh}
