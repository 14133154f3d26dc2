"""Logical axes, layouts, shares of the batch and random numbers that do not depend on them."""

from switch_tf.partitioning.axes import (
    LOGICAL_AXES,
    add_weight,
    arange,
    constrain,
    gather,
    is_partitioned,
    is_split,
    scatter,
    use,
)
from switch_tf.partitioning.layout import Layout
from switch_tf.partitioning.parts import check_parts, current_part, part_of_batch, share_of_groups
from switch_tf.partitioning.products import prefers_products, product
from switch_tf.partitioning.random import (
    batch_positions,
    fresh_seed,
    layer_seed,
    random_seed,
    step_seed,
    uniform,
    uniform_at,
)
from switch_tf.partitioning.rematerialization import rematerialize
from switch_tf.partitioning.shapes import has_dynamic_shapes

__all__ = ["LOGICAL_AXES", "Layout", "add_weight", "arange", "batch_positions", "check_parts", "constrain",
           "current_part", "fresh_seed", "gather", "has_dynamic_shapes", "is_partitioned", "is_split", "layer_seed",
           "part_of_batch", "prefers_products", "product", "random_seed", "rematerialize", "scatter",
           "share_of_groups", "step_seed", "uniform", "uniform_at", "use"]
