"""Features that join batches after they were read, because they depend on the rows and on nothing else."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import tensorflow as tf


class AddedFeatures(NamedTuple):
    """Features that a function finds for each row. Rows of zeros, which other processes read, are not looked for.

    Attributes:
        widths: Name -> width of the feature, which is <int32>[batch, width].
        of_rows: Function of a dict of <int32>[rows, length] that returns a dict of <int32>[rows, width]. Its Refusal
            ends the run.
    """

    widths: Mapping[str, int]
    of_rows: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]

    def added_to(self, batches: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        """Returns batches, dict of <int32>[..., rows, length], with these features."""
        arrays = {name: np.asarray(value) for name, value in batches.items()}
        before = next(iter(arrays.values())).shape[:-1]
        found = self.of_rows({name: array.reshape(-1, array.shape[-1]) for name, array in arrays.items()})
        return {**batches, **{name: tf.constant(found[name].reshape(*before, width), tf.int32)
                              for name, width in self.widths.items()}}

    def specs(self, *before: int) -> dict[str, tf.TensorSpec]:
        """Returns the specifications of these features, with dimensions before the width."""
        return {name: tf.TensorSpec((*before, width), tf.int32, name=name) for name, width in self.widths.items()}
