"""Types of tensors and shapes in signatures.

Any back end's tensors pass through layers: TensorFlow's, JAX's, and Keras' symbolic ones. Docstrings give dtypes and
shapes.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

Tensor: TypeAlias = Any
Mask: TypeAlias = Tensor | None  # of booleans; None masks nothing
Shape: TypeAlias = Sequence[int | None]
