"""Types of tensors and shapes in signatures.

Layers take tensors of any back end: TensorFlow's, JAX's, and Keras' symbolic ones.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

Tensor: TypeAlias = Any
Mask: TypeAlias = Tensor | None  # booleans; None means no mask
Shape: TypeAlias = Sequence[int | None]
