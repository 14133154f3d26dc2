"""One row of a teacher's stored predictions: its key, its bytes, and the features that it becomes in a batch.

A row is found by its content, so the order of batches, their size and the number of processes do not matter. At every
target it has k token ids (uint16, or int32 for large vocabularies), their log-probabilities (float16), the log of the
probability of all other tokens and the log-probability of the target at temperature 1 (float32). Features are int32, so
floats are stored there by their bits.
"""

import hashlib
from typing import Any, NamedTuple

import numpy as np

KEY_BYTES = 16
# Names of the features in a batch.
IDS, LOG_PROBS, LOG_REST, TARGET_LOG_PROBS = NAMES = (
    "teacher_token_ids", "teacher_log_probs", "teacher_log_rest", "teacher_target_log_probs")
_LOWEST = -6e4  # float16 has no lower numbers, and no probability of float32 is so small


def keys(features: dict[str, np.ndarray]) -> np.ndarray:
    """Returns the keys of rows, <bytes16>[rows]: a 128-bit hash of the features, by name.

    Args:
        features: dict of <int32>[rows, length].
    """
    rows = np.ascontiguousarray(np.concatenate([features[name] for name in sorted(features)], axis=1), "<i4")
    return np.array([hashlib.blake2b(row, digest_size=KEY_BYTES).digest() for row in rows], f"S{KEY_BYTES}")


class RowPredictions(NamedTuple):
    """Predictions of rows. `token_ids`, `log_probs`: [rows, length, k]. `log_rest`, `target_log_probs`: [rows, length].
    """

    token_ids: Any
    log_probs: Any
    log_rest: Any
    target_log_probs: Any


class RowFormat(NamedTuple):
    """The sizes of a row.

    Attributes:
        length: Targets in a row.
        top_k: Tokens that are stored for each.
        vocab_size: Size of the vocabulary.
    """

    length: int
    top_k: int
    vocab_size: int

    @property
    def widths(self) -> dict[str, int]:
        """Name -> width of each feature."""
        return {IDS: self.length * self.top_k, LOG_PROBS: self.length * self.top_k, LOG_REST: self.length,
                TARGET_LOG_PROBS: self.length}

    @property
    def _dtype(self):
        shape = self.length, self.top_k
        return np.dtype([(IDS, "<u2" if self.vocab_size <= 2**16 else "<i4", shape), (LOG_PROBS, "<f2", shape),
                         (LOG_REST, "<f4", self.length), (TARGET_LOG_PROBS, "<f4", self.length)])

    def pack(self, predictions: RowPredictions, is_target: np.ndarray) -> list[bytes]:
        """Returns the bytes of rows, with zeros where there is no target.

        Args:
            predictions: RowPredictions of arrays.
            is_target: <bool>[rows, length].
        """
        rows = np.zeros(len(is_target), self._dtype)
        for name, values in zip(NAMES, predictions, strict=True):
            kept = is_target[..., None] if values.ndim == 3 else is_target
            rows[name] = np.where(kept, values if name == IDS else np.maximum(values, _LOWEST), 0)
        return [row.tobytes() for row in rows]

    def unpack(self, rows: list[bytes]) -> dict[str, np.ndarray]:
        """Returns the features of rows, dict of <int32>[rows, width]."""
        found = np.frombuffer(b"".join(rows), self._dtype)
        floats = {name: found[name].astype("float32") for name in NAMES[1:]}
        floats[LOG_PROBS] = _with_sum(floats[LOG_PROBS], -np.expm1(floats[LOG_REST]))
        features = {IDS: found[IDS].astype("int32"), **{name: values.view("int32") for name, values in floats.items()}}
        return {name: values.reshape(len(rows), -1) for name, values in features.items()}


def _with_sum(log_probs, expected):
    """Returns log-probabilities whose probabilities have the sums that they had before float16 rounded them.

    Args:
        log_probs: <float32>[..., k].
        expected: <float32>[...], 0 where there is no target.
    """
    sums = np.exp(log_probs).sum(axis=-1)
    return log_probs + np.log(np.maximum(expected, 1e-30) / sums)[..., None]
