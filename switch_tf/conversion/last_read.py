"""The tensor that was read last, kept because its next part is needed soon."""

from collections.abc import Callable

import numpy as np


class LastRead:
    """Keeps one tensor in memory."""

    def __init__(self):
        self._name, self._values = None, None

    def get(self, name: str, load: Callable[[], np.ndarray]) -> np.ndarray:
        """Returns the tensor of a name. `load` reads it, unless it is the last one that was read."""
        if self._name != name:
            self._name = self._values = None  # before the next one takes memory
            self._name, self._values = name, load()
        return self._values
