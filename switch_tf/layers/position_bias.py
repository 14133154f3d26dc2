"""T5's relative position bias, shared by all layers of a stack."""

from typing import Any

import keras
import numpy as np
from keras import ops

from switch_tf import checks, partitioning
from switch_tf.ops import dtypes
from switch_tf.partitioning.tensors import Shape, Tensor


def relative_position_bucket(distance: np.ndarray, is_bidirectional: bool, num_buckets: int = 32,
                             max_distance: int = 128) -> np.ndarray:
    """Assigns relative positions to buckets: one each when near, logarithmic up to `max_distance`, then the last.

    Uses NumPy because accelerators round logarithms differently at the edges of buckets.

    Args:
        distance: <int>[...]. Key position minus query position.
        is_bidirectional: bool. Whether half of the buckets are for keys after the query. Otherwise bucket 0 holds all
            later keys.
        num_buckets: int.
        max_distance: int. Longer distances share a bucket.

    Returns: <int32>, same shape as `distance`, in [0, num_buckets).
    """
    distance = np.asarray(distance)
    offset = 0
    if is_bidirectional:
        num_buckets //= 2
        offset = (distance > 0) * num_buckets
        distance = np.abs(distance)
    else:
        distance = np.maximum(-distance, 0)
    max_exact = num_buckets // 2
    logarithmic = max_exact + (
        np.log(np.maximum(distance, 1) / max_exact) / np.log(max_distance / max_exact) * (num_buckets - max_exact)
    ).astype(np.int32)
    bucket = np.where(distance < max_exact, distance, np.minimum(logarithmic, num_buckets - 1))
    return (bucket + offset).astype(np.int32)


@keras.saving.register_keras_serializable("switch_tf")
class RelativePositionBias(keras.layers.Layer):
    """Learned bias for each head and relative position.

    Args:
        num_heads: int.
        num_buckets, max_distance: int. See `relative_position_bucket`.
        is_bidirectional: bool. True in encoders, False in decoders.

    Call arguments:
        query_length, key_length: int, or <int32> scalar if a length is unknown while tracing.
        first_query: int or <int32> scalar. Position of the first query. The first key is at position 0.

    Returns: <float32>[1, heads, query, key].
    """

    def __init__(self, num_heads: int, num_buckets: int = 32, max_distance: int = 128, is_bidirectional: bool = True,
                 **kwargs: Any):
        super().__init__(**kwargs)
        self.num_heads = checks.integer("num_heads", num_heads, at_least=1)
        self.is_bidirectional = checks.flag("is_bidirectional", is_bidirectional)
        # Half of a direction's buckets are exact; the logarithmic ones must reach further than those.
        per_exact = 4 if is_bidirectional else 2
        self.num_buckets = checks.integer("num_buckets", num_buckets, at_least=per_exact)
        self.max_distance = checks.integer("max_distance", max_distance, at_least=self.num_buckets // per_exact + 1)

    def build(self, input_shape: Shape | None = None) -> None:
        # Glorot uniform, as in Mesh TensorFlow.
        limit = (6 / (self.num_heads + self.num_buckets)) ** 0.5
        self.rel_embedding = partitioning.add_weight(
            self, "rel_embedding", (self.num_heads, self.num_buckets), ("heads", "relpos_buckets"),
            keras.initializers.RandomUniform(-limit, limit))

    def call(self, query_length: int | Tensor, key_length: int | Tensor, first_query: int | Tensor = 0) -> Tensor:
        query_length = checks.size("query_length", query_length, at_least=1)
        key_length = checks.size("key_length", key_length, at_least=1)
        # A bias depends only on key - query. Looking up the query + key - 1 distances once, then cutting a shifted row
        # for each query, keeps [query, key] constants and scatters out of the program.
        furthest = self.max_distance  # longer distances share its bucket
        table = relative_position_bucket(np.arange(-furthest, furthest + 1), self.is_bidirectional, self.num_buckets,
                                         self.max_distance)
        distances = partitioning.arange(query_length + key_length) + 1 - query_length - first_query
        distances = ops.clip(distances, -furthest, furthest)
        buckets = ops.take(ops.convert_to_tensor(table), distances + furthest)
        dtype = dtypes.wide_dtype(self.compute_dtype)
        one_hot = ops.one_hot(buckets, self.num_buckets, dtype=dtype)
        by_distance = ops.einsum("hn,dn->hd", partitioning.use(self.rel_embedding, dtype), one_hot)
        # Row i of `shifted` starts i places later in the repeated row; entry query_length - 1 + j is distance j - i.
        width = query_length + key_length
        repeated = ops.tile(by_distance, (1, query_length))[:, :query_length * (width - 1)]
        shifted = ops.reshape(repeated, (self.num_heads, query_length, width - 1))
        bias = ops.expand_dims(shifted[:, :, query_length - 1:query_length - 1 + key_length], 0)
        return partitioning.constrain(bias, (None, "heads", None, None))

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "num_heads": self.num_heads, "num_buckets": self.num_buckets,
                "max_distance": self.max_distance, "is_bidirectional": self.is_bidirectional}
