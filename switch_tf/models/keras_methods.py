"""Keras' model methods for a model that takes a dictionary of token ids."""

from typing import Any

import keras

from switch_tf import checks
from switch_tf.ops import indexing
from switch_tf.partitioning.tensors import Tensor
from switch_tf.refusals import Refusal

IDS = tuple(f"{stack}_{feature}" for stack in ("encoder", "decoder")
            for feature in ("input_tokens", "segment_ids", "target_tokens"))


class FeaturesModel(keras.Model):
    """A keras.Model that takes seqio features and builds its weights from its configuration alone.

    Subclasses define `required_features`, the names of the features that a call needs.
    """

    _called_with: dict[str, tuple[str, int]] | None = None  # feature name -> (dtype, rank) in the last call
    # A SavedModel stores every attribute that is a tf.function, and Keras' default signature has float inputs.
    _default_save_signature = None

    def read_features(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        """Checks the features and returns them, with ids instead of the floats of Keras' symbolic build.

        Args:
            features: dict of <int>[batch, length]. See `SwitchTransformer`.

        Raises:
            Refusal: missing features, or values that are not ids of one shape per stack.
        """
        required = self.required_features
        if not isinstance(features, dict):
            raise Refusal(f"The model needs a dictionary of features by seqio's names, such as {required[0]!r}, "
                          f"not {checks.shown(features)}.")
        missing = [name for name in required if name not in features]
        if missing:
            names = " and ".join(repr(name) for name in missing)
            raise Refusal(f"The model needs the feature{'s' * (len(missing) > 1)} {names} (<int32>[batch, "
                          f"length]); it was given {sorted(features)}. seqio's EncDecFeatureConverter makes all "
                          "of them.")
        features = {name: indexing.as_ids(value) if name in IDS else value for name, value in features.items()}
        for stack in ("encoder", "decoder"):
            shape: Any = ()
            for name in IDS:
                if name.startswith(stack) and name in features:
                    shape = shape or getattr(features[name], "shape", ())  # a value without one is refused below
                    checks.tensor(name, features[name], "int", shape if len(shape) == 2 else (None, None))
        self._called_with = {name: (keras.backend.standardize_dtype(value.dtype), len(value.shape))
                             for name, value in features.items() if value is not None}
        return features

    # Build before tracing: weights created inside a trace have no values if the trace raises.

    def make_train_function(self, force: bool = False) -> Any:
        self._ensure_built()
        return super().make_train_function(force)

    def make_test_function(self, force: bool = False) -> Any:
        self._ensure_built()
        return super().make_test_function(force)

    def make_predict_function(self, force: bool = False) -> Any:
        self._ensure_built()
        return super().make_predict_function(force)

    def _ensure_built(self):
        if not self.built:
            self.build()

    def compute_loss(self, x: Any = None, y: Tensor | None = None, y_pred: Tensor | None = None,
                     sample_weight: Tensor | None = None, training: bool = True) -> Tensor:
        """Computes the loss, see `keras.Model.compute_loss`.

        Raises:
            Refusal: `compile` without a loss, or `fit` without targets. Only the router losses would be left.
        """
        if self.loss is None:
            raise Refusal(
                "compile was given no loss, so only the routers' losses would be trained; give it one, such as "
                "loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0).")
        if y is None:
            raise Refusal(
                "The loss needs targets, <int32>[batch, length], as y: model.fit(features, targets), or a dataset of "
                "(features, targets). They are no part of the features that the model is called with.")
        return super().compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=training)

    def export(self, filepath: Any, format: str = "tf_saved_model", verbose: bool | None = None,
               input_signature: list[dict[str, keras.InputSpec]] | None = None, **kwargs: Any) -> Any:
        """Exports the forward pass for inference, see `keras.Model.export`. `inference.export` exports decoding.

        Args:
            filepath, format, verbose, **kwargs: See `keras.Model.export`.
            input_signature: list of one dict from feature names to keras.InputSpec. Defaults to the features of the
                last call, or the required ones, with ids as <int32>[batch, length] of any size.
        """
        self._ensure_built()
        if input_signature is None:
            called_with = self._called_with or dict.fromkeys(self.required_features, ("int32", 2))
            input_signature = [{
                name: keras.InputSpec(shape=(None,) * rank, dtype="int32" if name in IDS else dtype, name=name)
                for name, (dtype, rank) in called_with.items()}]
        return super().export(filepath, format=format, verbose=verbose, input_signature=input_signature, **kwargs)

    def summary(self, *args: Any, **kwargs: Any) -> None:
        """Prints the layers, see `keras.Model.summary`. Builds the model first if needed."""
        self._ensure_built()
        return super().summary(*args, **kwargs)

    def count_params(self) -> int:
        """Returns the number of parameters. Builds the model first if needed."""
        self._ensure_built()
        return super().count_params()

    def quantize(self, mode: str | None = None, config: Any = None, **kwargs: Any) -> None:
        """Raises Refusal, because no layer has a quantized form and Keras would silently change nothing."""
        raise Refusal(
            f"{type(self).__name__} cannot be quantized: its layers have no quantized form. For weights of half the "
            'size make the model with dtype="bfloat16".')
