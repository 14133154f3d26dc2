"""Programs with static shapes for few inputs at a time, compiled in the background."""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from switch_tf import decoding
from switch_tf.ops import forms

# Numbers of inputs that programs are compiled for.
_ROWS = (1, 4)


class FewRows:
    """Compiled programs for one to four inputs.

    Such a program takes half the time of the one for any shape, and seconds to compile. So a thread compiles it when
    its shape is first needed, one at a time, and the program for any shape answers meanwhile. Lengths are padded to 32,
    64, 128 and so on, which keeps programs few, as each takes some 50 MiB.

    Args:
        decode: Function to trace, from <int32>[rows, length] and <int32>[rows, 1] to a tuple of tensors [rows, ...].
        inputs_length: int. Longest input.
        most_rows: int. Largest number of inputs that a static shape makes faster, `decoding.max_fused_sequences`.
    """

    def __init__(self, decode: Callable[..., Any], inputs_length: int, most_rows: int):
        self._decode = decode
        self._rows = [rows for rows in _ROWS if rows <= most_rows]
        self._inputs_length = inputs_length
        self._programs = {}
        self._maker: threading.Thread | None = None

    def program(self, rows: int, length: int) -> tuple[tuple[int, int], Callable[..., Any]] | None:
        """Returns the shape to pad to and its program, or None, and then starts to compile it.

        Args:
            rows, length: int. Shape of the inputs.
        """
        shape = self._shape(rows, length)
        if shape is None:
            return None
        if shape in self._programs:
            program = self._programs[shape]
            return program and (shape, program)
        if self._maker is None or not self._maker.is_alive():
            # Not a daemon, because a process that ends while a daemon traces is aborted.
            self._maker = threading.Thread(target=self._make, args=shape, name="compiler", daemon=False)
            self._maker.start()
        return None

    def _shape(self, rows, length):
        rows = next((most for most in self._rows if rows <= most), None)
        filled = decoding.bucketed_length(1)
        while filled < length:
            filled *= 2
        return rows and (rows, min(filled, self._inputs_length))

    def _make(self, rows, length):
        self._programs[rows, length] = None  # after an error, which the thread prints, it is not tried again
        program = forms.compiled(self._decode)
        program(np.zeros((rows, length), "int32"), np.zeros((rows, 1), "int32"))
        self._programs[rows, length] = program
