"""Types of tensors and shapes in signatures: of TensorFlow, JAX, or symbolic in Keras."""

from collections.abc import Sequence
from typing import Any, TypeAlias

Tensor: TypeAlias = Any
Mask: TypeAlias = Tensor | None  # booleans
Shape: TypeAlias = Sequence[int | None]
