"""The Keras model, from seqio features to logits and router statistics."""

import collections
import dataclasses
import functools
import os
from typing import Any

import keras
import numpy as np
from keras import ops

from switch_tf import checks, context, decoding, partitioning
from switch_tf.configs import shipped_gin
from switch_tf.configs.choices import check_choice
from switch_tf.configs.switch_config import SwitchConfig
from switch_tf.layers import LogitsDense, Router, TokenEmbedding, masks
from switch_tf.layers.attention import VALUE_CACHE_AXES
from switch_tf.layers.moe import Routed
from switch_tf.models.stack import Cache, Stack
from switch_tf.ops import dtypes, forms, indexing, random
from switch_tf.partitioning.tensors import Tensor
from switch_tf.refusals import Refusal

_IDS = tuple(f"{stack}_{feature}" for stack in ("encoder", "decoder")
            for feature in ("input_tokens", "segment_ids", "target_tokens"))
_CONFIG_FIELDS = [field.name for field in dataclasses.fields(SwitchConfig)]


def _after_building(method):
    @functools.wraps(method)
    def after_building(self, *args, **kwargs):
        if not self.built:
            self.build()
        return method(self, *args, **kwargs)

    return after_building


@keras.saving.register_keras_serializable("switch_tf")
class SwitchTransformer(Routed, keras.Model):
    """T5 encoder-decoder, or only the encoder, with experts in some layers (arXiv 2101.03961).

    `model(features)` adds the weighted router losses with `add_loss`, so `fit` minimises the paper's loss.
    `model.forward(features)` returns `(logits, router_stats)`, one RouterStats for each of `config.sparse_layer_names`.
    Experts drop no token in `predict`, `evaluate`, `generate` and exported programs, so a row does not depend on others
    there; in a call experts have the capacity of `config`.

    Args:
        config: SwitchConfig, or a dict of its fields, as stored in saved models.
        dtype: Keras dtype policy. "mixed_bfloat16" has float32 weights and bfloat16 compute.

    Call arguments:
        features: <int32>[batch, length] by seqio name. Requires `encoder_input_tokens` and, with a decoder,
            `decoder_input_tokens`. The encoder's mask comes from `encoder_segment_ids`, else nonzero tokens; the
            decoder's from `decoder_segment_ids`, else nonzero `decoder_target_tokens`, else all positions are real.

    Returns: <float32>[batch, length, vocab_size], logits of the decoder, or of an encoder-only model.
    """

    _called_with = None  # feature name -> (dtype, rank) in the last call
    # A SavedModel would store it, and Keras' default has float inputs.
    _default_save_signature = None

    def __init__(self, config: SwitchConfig | dict[str, Any], dtype: Any = None, name: str = "switch_transformer",
                 **kwargs: Any):
        with checks.arguments_of_keras():
            super().__init__(dtype=dtype, name=name, **kwargs)
        if not isinstance(config, SwitchConfig):
            if not isinstance(config, dict):
                raise Refusal("config must be a SwitchConfig, or a dictionary of its fields, not "
                              f"{checks.shown(config)}.")
            for field in config:
                check_choice("A field of a SwitchConfig", field, _CONFIG_FIELDS)
            config = SwitchConfig(**config)
        self.config, policy = config, self.dtype_policy
        self.token_embedder = TokenEmbedding(config.vocab_size, config.d_model, dtype=policy, name="token_embedder")
        self.encoder = Stack(config, is_decoder=False, dtype=policy, name="encoder")
        self.decoder = None if config.is_encoder_only else Stack(config, True, dtype=policy, name="decoder")
        self._programs = collections.UserDict()  # of `generate`; TensorFlow would export a dict's programs
        self.logits_dense = None if config.logits_via_embedding else LogitsDense(
            config.vocab_size, config.init_scale, dtype=policy, name="logits_dense")

    @classmethod
    def from_preset(cls, preset: str, dtype: Any = None, name: str = "switch_transformer",
                    **overrides: Any) -> "SwitchTransformer":
        """Returns a model with a preset's configuration and initial weights.

        For pretrained weights use `conversion.from_hugging_face(folder)`.

        Args:
            preset: Such as "switch_base_8". `switch-tf inspect --list` prints all presets.
            **overrides: Fields of SwitchConfig to change, such as `dropout_rate=0.1`.
        """
        for field in overrides:
            check_choice("A keyword of from_preset", field, ["dtype", "name", *_CONFIG_FIELDS])
        if checks.text("preset", preset) not in shipped_gin.preset_names() and os.path.isdir(preset):
            raise Refusal(f"{preset!r} is a folder and no preset; for one of Hugging Face's form use "
                          f"switch_tf.conversion.from_hugging_face({preset!r}).")
        return cls(dataclasses.replace(SwitchConfig.from_preset(preset), **overrides), dtype=dtype, name=name)

    @property
    def required_features(self) -> tuple[str, ...]:
        """Names of the required features of a call."""
        return ("encoder_input_tokens",) + ("decoder_input_tokens",) * (not self.config.is_encoder_only)

    @property
    def routers(self) -> dict[str, int]:
        """Number of experts by router name."""
        return dict.fromkeys(self.config.sparse_layer_names, self.config.num_experts)

    @property
    def router_layers(self) -> tuple[Router, ...]:
        """The Routers, in the order of `config.sparse_layer_names`."""
        return tuple(experts.router for experts in self._list_expert_layers())

    def _list_expert_layers(self):
        return [experts for stack in (self.encoder, self.decoder) if stack is not None
                for layer in stack.layers for experts in layer.list_expert_layers()]

    def build(self, input_shape: Any = None) -> None:
        for layer in (self.token_embedder, self.encoder, self.decoder, self.logits_dense):
            if layer is not None:
                layer.build((None, None, self.config.d_model))

    def call(self, features: dict[str, Tensor], training: bool = False, return_router_stats: bool = False) -> Any:
        training = checks.flag("training", training)
        return_router_stats = checks.flag("return_router_stats", return_router_stats)
        features = self._read_features(features)
        with random.random_seed(random.fresh_seed() if training else None):
            logits, router_stats = self._run(features, training)
        if return_router_stats:
            return logits, router_stats
        self.add_router_losses(self._list_expert_layers(), router_stats, training)
        return logits

    def _read_features(self, features):
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
        features = dict(features)
        for stack in ("encoder", "decoder"):
            shape = ()
            for name in _IDS:
                if name.startswith(stack) and name in features:
                    shape = shape or getattr(features[name], "shape", ())  # a value without a shape is refused below
                    features[name] = indexing.check_ids(
                        name, features[name], shape if len(shape) == 2 else (None, None))
        self._called_with = {name: (keras.backend.standardize_dtype(value.dtype), len(value.shape))
                             for name, value in features.items() if value is not None}
        return features

    def _encode(self, features, is_real, training):
        segments = features.get("encoder_segment_ids")
        mask = masks.key_mask(is_real) if segments is None else masks.attention_mask(segments, segments)
        tokens = features["encoder_input_tokens"]
        return self.encoder(self.token_embedder(tokens), is_real, mask, token_ids=tokens, training=training)

    def _run(self, features, training):
        encoder_is_real = masks.encoder_is_real(features)
        hidden, router_stats = self._encode(features, encoder_is_real, training)
        if self.decoder is None:
            return self._logits(hidden), router_stats
        tokens = features["decoder_input_tokens"]
        segments, encoder_segments = features.get("decoder_segment_ids"), features.get("encoder_segment_ids")
        decoder_segments = ops.ones_like(tokens) if segments is None else segments
        mask = masks.attention_mask(decoder_segments, decoder_segments, is_causal=True)
        if segments is None or encoder_segments is None:
            encoder_decoder_mask = masks.key_mask(encoder_is_real)
        else:
            encoder_decoder_mask = masks.attention_mask(segments, encoder_segments)
        rules = self.config.rules
        if rules.masks_decoder_inputs and "decoder_target_tokens" in features:
            # As in Flaxformer, the position after a sequence's end attends to all positions evenly.
            has_target = ops.not_equal(features["decoder_target_tokens"], 0)[:, None, :, None]
            mask, encoder_decoder_mask = (one & has_target for one in (mask, encoder_decoder_mask))
        hidden, decoder_stats = self.decoder(
            self.token_embedder(tokens), masks.decoder_is_real(features, rules), mask, hidden, encoder_decoder_mask,
            token_ids=tokens, training=training)
        return self._logits(hidden), router_stats + decoder_stats

    def _logits(self, hidden):
        if self.config.scales_logits:
            # In bfloat16 the factor for d_model = 768, and so every logit, is off by 1/740.
            hidden = ops.cast(dtypes.widen(hidden) * self.config.d_model**-0.5, hidden.dtype)
        return self.token_embedder.attend(hidden) if self.logits_dense is None else self.logits_dense(hidden)

    @_after_building
    def encode(self, features: dict[str, Tensor]) -> Tensor:
        """Runs only the encoder, without dropout.

        Args:
            features: With `encoder_input_tokens`, <int32>[batch, length], padding 0.

        Returns:
            <compute dtype>[batch, length, d_model], the encoder's last hidden states (Hugging Face's T5EncoderModel),
            undefined at padding.
        """
        return self._encode(features, masks.encoder_is_real(features), training=False)[0]

    def prefill(self, features: dict[str, Tensor], max_length: int) -> tuple[tuple[Cache, Tensor], Cache]:
        """Encodes inputs and prepares the caches of `decode_step`.

        Args:
            features: With `encoder_input_tokens`, <int32>[batch, length], padding 0, not packed.

        Returns:
            `(cross_cache, cache)`. `cross_cache` is constant over steps: each layer's keys and values, and the mask of
            the inputs. `cache` is the empty cache of self-attention.
        """
        is_real = masks.encoder_is_real(features)
        hidden, _ = self._encode(features, is_real, training=False)
        cross_cache = tuple(layer.cross_attention.compute_cache(hidden) for layer in self.decoder.layers)
        sizes = {"batch": ops.shape(hidden)[0], "heads": self.config.num_heads, "length": max_length,
                 "kv": self.config.d_kv}
        cache = tuple(tuple(
            partitioning.constrain(ops.zeros([sizes[axis] for axis in axes], layer.attention.cache_dtype), axes)
            for axes in layer.attention.cache_axes) for layer in self.decoder.layers)
        return (cross_cache, masks.key_mask(is_real)), cache

    def decode_step(self, tokens: Tensor, is_real: Tensor, cache: Cache, position: Tensor,
                    cross_cache: tuple[Cache, Tensor]) -> tuple[Tensor, Cache]:
        """Computes the logits after one more token of each sequence.

        They equal `call`'s logits at `position` for the whole sequence.

        Args:
            tokens: <int32>[batch], at `position`. The first is 0, the start of a sequence.
            is_real: <bool>[batch], False after the end of a sequence. Logits there are undefined.
            cache: From `prefill` or the previous step.
            position: <int32> scalar.

        Returns:
            `(logits, cache)`: <float32>[batch, vocab_size] and the updated cache.
        """
        tokens, is_real = tokens[:, None], is_real[:, None]
        cross_caches, encoder_decoder_mask = cross_cache
        max_length = cache[0][-1].shape[VALUE_CACHE_AXES.index("length")]
        position_biases = self.decoder.position_biases(query_length=1, key_length=max_length, first_query=position)
        attention_mask = (partitioning.arange(max_length) <= position)[None, None, None, :]
        hidden, new_cache = self.token_embedder(tokens), []
        for layer, layer_cache, layer_cross_cache, position_bias in zip(
                self.decoder.layers, cache, cross_caches, position_biases, strict=True):
            hidden, layer_cache = layer.decode_step(hidden, is_real, layer_cache, position, layer_cross_cache,
                                                    attention_mask, encoder_decoder_mask, position_bias, tokens)
            new_cache.append(layer_cache)
        return self._logits(self.decoder.finish(hidden, is_real))[:, 0], tuple(new_cache)

    def generate(self, inputs: Any, max_length: int = 64, sampler: str | decoding.Sampler = "greedy",
                 end_id: int | tuple[int, ...] | None = None) -> Tensor:
        """Decodes output ids from input ids.

        Compiles for each sampler, batch size and input length, rounded up to a multiple of 32.

        Args:
            inputs: Array, tensor or list, <int32>[batch, length]. 0 is padding, before or after the ids.
            max_length: Maximum number of decoded tokens, including the end of sequence.
            sampler: "greedy", "sample", "beam" or a sampler, such as `switch_tf.decoding.Sample(top_p=0.9)`.
            end_id: Ids that end a sequence. Defaults to `SwitchConfig.end_id`.

        Returns:
            <int32>[batch, max_length], each sequence with its end, then zeros. For several with their scores use
            `sampler.decode`.
        """
        inputs = self._read_inputs(inputs)
        key = decoding.get_sampler(sampler), checks.integer("max_length", max_length, 1), checks.optional(
            "end_id", end_id, checks.ids, self.config.vocab_size)
        if key not in self._programs:
            if not self.built:
                self.build()
            self._programs[key] = forms.compiled(
                lambda inputs: key[0].ids(self, {"encoder_input_tokens": inputs}, *key[1:]))
        padding = decoding.bucketed_length(inputs.shape[1]) - inputs.shape[1]
        return self._programs[key](np.pad(inputs, ((0, 0), (0, padding))))

    def _read_inputs(self, inputs):
        try:
            inputs = np.asarray(ops.convert_to_numpy(inputs))
        except (ValueError, TypeError):
            raise Refusal("inputs must be ids, <int32>[batch, length], with 0 for padding where sequences are "
                          f"shorter, not {checks.shown(inputs)}.") from None
        if isinstance(next(inputs.flat, None), str | bytes):
            raise Refusal("inputs must be ids, <int32>[batch, length]; for texts use "
                          "switch_tf.inference.generate(model, texts, vocabulary).")
        checks.tensor("inputs", inputs, "int" if inputs.size else "number", (None, None))
        if not inputs.size:
            raise Refusal(f"inputs must hold ids, and these are <int>{list(inputs.shape)}: none at all.")
        checks.indices("Ids of inputs", inputs, self.config.vocab_size)
        return inputs.astype("int32")

    # Built before tracing: weights created inside a trace have no values if it raises.
    make_train_function = _after_building(keras.Model.make_train_function)
    make_test_function = _after_building(keras.Model.make_test_function)
    make_predict_function = _after_building(keras.Model.make_predict_function)
    summary = _after_building(keras.Model.summary)
    count_params = _after_building(keras.Model.count_params)

    def compute_loss(self, x: Any = None, y: Tensor | None = None, y_pred: Tensor | None = None,
                     sample_weight: Tensor | None = None, training: bool = True) -> Tensor:
        """Computes the loss, see `keras.Model.compute_loss`.

        Raises:
            Refusal: Without a loss or targets, only the router losses would be trained.
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

    @_after_building
    def export(self, filepath: Any, format: str = "tf_saved_model", verbose: bool | None = None,
               input_signature: list[dict[str, keras.InputSpec]] | None = None, **kwargs: Any) -> Any:
        """Exports the pass of `predict`, see `keras.Model.export`. `inference.export` exports decoding.

        Args:
            input_signature: One dict from feature names to keras.InputSpec. Defaults to the features of the last call,
                or the required features, with ids as <int32>[batch, length] of any size.
        """
        if input_signature is None:
            called_with = self._called_with or dict.fromkeys(self.required_features, ("int32", 2))
            input_signature = [{
                name: keras.InputSpec(shape=(None,) * rank, dtype="int32" if name in _IDS else dtype, name=name)
                for name, (dtype, rank) in called_with.items()}]
        with context.within(no_drop=True):
            return super().export(filepath, format=format, verbose=verbose, input_signature=input_signature, **kwargs)

    @context.within(no_drop=True)
    def predict_step(self, data: Any) -> Any:
        return super().predict_step(data)

    @context.within(no_drop=True)
    def test_step(self, data: Any) -> Any:
        return super().test_step(data)

    def quantize(self, mode: str | None = None, config: Any = None, **kwargs: Any) -> None:
        """Raises Refusal: no layer has a quantized form, and Keras would silently change nothing."""
        raise Refusal(
            f"{type(self).__name__} cannot be quantized: its layers have no quantized form. For weights of half the "
            'size make the model with dtype="bfloat16".')

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "config": dataclasses.asdict(self.config)}
