"""Back ends: what runs a training step on devices, a module each."""

import importlib
import typing

from switch_tf.partitioning import cluster
from switch_tf.partitioning.backend_table import BACKENDS
from switch_tf.partitioning.layout import Layout

if typing.TYPE_CHECKING:
    from switch_tf.partitioning.partitioner import Partitioner  # imports TensorFlow


def create_partitioner(layout: Layout) -> "Partitioner":
    """Creates the partitioner of a layout for the devices of all processes that train together.

    Starts the devices. With several processes, nothing of TensorFlow may run before.

    Raises:
        Refusal: The mesh does not fit the devices, or this machine cannot run the back end.
    """
    return importlib.import_module(BACKENDS[layout.backend]).create(layout, cluster.members())
