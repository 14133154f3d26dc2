"""Programs of known shape for few inputs at a time, made beside the work of the one of any size."""

import threading

import numpy as np

from switch_tf import decoding
from switch_tf.ops import forms

# Inputs that programs are made for: for one, and for up to four.
_ROWS = (1, 4)


class FewRows:
    """Decodes one to four inputs by a program of their shape, where that is there.

    Such a program takes half of the time of one of any size, and seconds to be made. So it is made in a thread when its
    shape is first asked for, one at a time, and the program of any size answers until it is there. Lengths are filled
    up to 32, 64, 128 and so on, so there are few of them: each keeps some 50 MiB.

    Args:
        decode: function of <int32>[rows, length] and <int32>[rows] that is traced, to a tuple of tensors [rows, ...].
        inputs_length: int, the longest.
        most_rows: int. For more there are no faster programs, `decoding.max_fused_sequences`.
    """

    def __init__(self, decode, inputs_length: int, most_rows: int):
        self._decode = decode
        self._rows = [rows for rows in _ROWS if rows <= most_rows]
        self._inputs_length = inputs_length
        self._programs = {}
        self._maker = None

    def program(self, rows: int, length: int):
        """The shape to fill up to and its program; or None while there is none, which is made then.

        Args:
            rows, length: int, of the inputs.
        """
        shape = self._shape(rows, length)
        if shape is None:
            return None
        if shape in self._programs:
            program = self._programs[shape]
            return program and (shape, program)
        if self._maker is None or not self._maker.is_alive():
            # No daemon, as a thread that asks may be: a process that ends while one traces is aborted.
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
        self._programs[rows, length] = None  # if it fails, which the thread says, it is not tried again
        program = forms.compiled(self._decode)
        program(np.zeros((rows, length), "int32"), np.zeros(rows, "int32"))
        self._programs[rows, length] = program
