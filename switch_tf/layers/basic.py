"""The base class of the layers, and T5's simple layers."""

import inspect
from typing import Any

import keras
from keras import ops

from switch_tf import checks, partitioning
from switch_tf.configs.choices import RULES, check
from switch_tf.ops import dtypes, forms, indexing, products, random
from switch_tf.partitioning.tensors import Shape, Tensor
from switch_tf.refusals import Refusal

serializable = keras.saving.register_keras_serializable("switch_tf")


class Layer(keras.layers.Layer):
    """Layer with its constructor's arguments in its config and as attributes."""

    def _keep(self, **arguments):
        """Checks arguments by `choices.RULES` and keeps them as attributes."""
        for name, value in arguments.items():
            setattr(self, name, check(name, value, RULES[name]))

    def _draw(self, purpose, shape):
        """Draws <float32>[shape] in [0, 1). The first axis is this part of the batch."""
        return random.uniform(random.layer_seed(self, purpose), tuple(shape))

    def get_config(self) -> dict[str, Any]:
        # A user's subclass may not keep its own arguments as attributes.
        made_here: Any = next(cls for cls in type(self).__mro__ if cls.__module__.startswith("switch_tf."))
        names = list(inspect.signature(made_here.__init__).parameters)[1:-1]  # without self and **kwargs
        config = super().get_config()
        for name in names:
            config[name] = getattr(self, name)
            if isinstance(config[name], keras.layers.Layer):
                config[name] = keras.saving.serialize_keras_object(config[name])
                config[name].pop("build_config", None)  # the outer layer builds it
        return config

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "Layer":
        return cls(**{name: keras.saving.deserialize_keras_object(value)
                      if isinstance(value, dict) and "class_name" in value else value
                      for name, value in config.items()})


class KeepsShape(Layer):
    """Layer that keeps the shape and Keras mask of its input."""

    supports_masking = True

    def compute_output_shape(self, input_shape: Shape) -> Shape:
        """Returns the output shape."""
        return tuple(input_shape)

    def compute_output_spec(self, *args: Any, **kwargs: Any) -> Any:
        """Traces `call`: inferring only the shape would skip its checks."""
        return keras.Operation.compute_output_spec(self, *args, **kwargs)


def kernel_initializer(init_scale: float, fan_in: int) -> keras.initializers.Initializer:
    """Returns a truncated normal with standard deviation sqrt(init_scale / fan_in) before truncation (section 2.4)."""
    return random.RandomByPosition("truncated_normal", (init_scale / fan_in) ** 0.5)


@serializable
class RMSNorm(KeepsShape):
    """T5's layer norm: RMS norm with a learned scale, in float32.

    Args:
        epsilon: Added to the mean square.

    Call arguments:
        inputs: <compute dtype>[..., d_model].

    Returns: <compute dtype>, same shape as `inputs`.
    """

    def __init__(self, epsilon: float = 1e-6, **kwargs: Any):
        super().__init__(**kwargs)
        self._keep(epsilon=epsilon)

    def build(self, input_shape: Shape) -> None:
        self.scale = partitioning.add_weight(self, "scale", (checks.width(input_shape, rank=None),), ("embed",), "ones")

    def call(self, inputs: Tensor) -> Tensor:
        checks.tensor("inputs", inputs, "float", (*[None] * (len(inputs.shape) - 1), self.scale.shape[0]))
        x = dtypes.widen(inputs)
        inverse_rms = ops.rsqrt(ops.mean(ops.square(x), axis=-1, keepdims=True) + self.epsilon)
        return ops.cast(x * inverse_rms * partitioning.use(self.scale, x.dtype), inputs.dtype)


def drop(x: Tensor, draws: Tensor, rate: float) -> Tensor:
    """Zeroes elements with a draw below `rate` and multiplies the rest by 1 / (1 - rate).

    Rounds once: a bfloat16 factor for rate 0.1 would make every output 0.16 % too small.

    Args:
        draws: <float>, uniform in [0, 1), in the shape of `x`.
    """
    factors = ops.cast(draws >= rate, dtypes.wide_dtype(x.dtype)) * (1 / (1 - rate))
    return ops.cast(dtypes.widen(x) * factors, x.dtype)


@serializable
class Dropout(KeepsShape):
    """Zeroes elements with probability `rate` in training and scales the rest by 1 / (1 - rate).

    Masks do not depend on layout, microbatches or restarts.

    Args:
        rate: In [0, 1).
        broadcast_axis: 0 or above. Positions along this axis share one mask, as along the sequence in T5.
    """

    def __init__(self, rate: float, broadcast_axis: int | None = None, **kwargs: Any):
        super().__init__(**kwargs)
        self.rate = checks.number("A dropout rate", rate, "in [0, 1)")
        self.broadcast_axis = checks.optional("broadcast_axis", broadcast_axis, checks.integer, 0)

    def build(self, input_shape: Shape | None = None) -> None:
        """Sets the layer's path, the seed of its random stream."""

    def call(self, inputs: Tensor, training: bool = False) -> Tensor:
        checks.tensor("inputs", inputs, "float", [None] * len(inputs.shape))
        if not checks.flag("training", training) or not self.rate:
            return inputs
        shape = list(ops.shape(inputs))
        if self.broadcast_axis is not None:
            if self.broadcast_axis >= len(shape):
                raise Refusal(f"broadcast_axis must be below {len(shape)}, the number of dimensions of the "
                              f"inputs, not {self.broadcast_axis}.")
            shape[self.broadcast_axis] = 1
        return drop(inputs, self._draw("dropout", shape), self.rate)


@serializable
class TokenEmbedding(KeepsShape):
    """T5's embedding table: initial standard deviation 1, unscaled outputs.

    Call arguments:
        token_ids: <int32>[batch, length], each in [0, vocab_size).

    Returns: <compute dtype>[batch, length, d_model].
    """

    def __init__(self, vocab_size: int, d_model: int, **kwargs: Any):
        super().__init__(**kwargs)
        self._keep(vocab_size=vocab_size, d_model=d_model)

    def build(self, input_shape: Shape | None = None) -> None:
        self.embedding = partitioning.add_weight(
            self, "embedding", (self.vocab_size, self.d_model), ("vocab", "embed"),
            random.RandomByPosition("normal", 1.0))

    def call(self, token_ids: Tensor) -> Tensor:
        token_ids = indexing.check_ids("token_ids", token_ids, (None, None))
        checks.indices("token_ids", forms.known_values(token_ids), self.vocab_size)
        embedded = indexing.look_up(self.embedding, token_ids, self.compute_dtype)
        return partitioning.constrain(embedded, ("batch", "length", "embed"))

    def compute_output_shape(self, input_shape: Shape) -> Shape:
        return (*input_shape[:2], self.d_model)

    def attend(self, hidden: Tensor) -> Tensor:
        """Returns tied logits: <compute dtype>[batch, length, d_model] -> <float32>[batch, length, vocab]."""
        return _logits("blm,vm->blv", hidden, self.embedding)


def _logits(equation, hidden, variable):
    # bfloat16 logits near 32 would be multiples of 1/4, with ties for the largest.
    logits = products.product(equation, hidden, variable, dtypes.wide_dtype(hidden.dtype))
    return partitioning.constrain(logits, ("batch", "length", "vocab"))


@serializable
class LogitsDense(KeepsShape):
    """Projection to logits with its own weights, as in T5 1.1.

    Args:
        init_scale: The initial variance is init_scale / d_model.

    Call arguments:
        inputs: <compute dtype>[batch, length, d_model].

    Returns: <float32>[batch, length, vocab_size].
    """

    def __init__(self, vocab_size: int, init_scale: float = 1.0, **kwargs: Any):
        super().__init__(**kwargs)
        self._keep(vocab_size=vocab_size, init_scale=init_scale)

    def build(self, input_shape: Shape) -> None:
        d_model = checks.width(input_shape)
        self.kernel = partitioning.add_weight(
            self, "kernel", (d_model, self.vocab_size), ("embed", "vocab"),
            kernel_initializer(self.init_scale, d_model))

    def call(self, inputs: Tensor) -> Tensor:
        checks.tensor("inputs", inputs, "float", (None, None, self.kernel.shape[0]))
        return _logits("blm,mv->blv", inputs, self.kernel)

    def compute_output_shape(self, input_shape: Shape) -> Shape:
        return (*input_shape[:-1], self.vocab_size)
