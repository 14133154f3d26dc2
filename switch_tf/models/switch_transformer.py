"""The Keras model, from seqio features to logits and router statistics."""

import collections
import dataclasses
import pathlib
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from switch_tf import checks, decoding, losses
from switch_tf.configs import shipped_gin
from switch_tf.configs.choices import check_choice
from switch_tf.configs.switch_config import SwitchConfig
from switch_tf.layers import LogitsDense, Router, TokenEmbedding, masks
from switch_tf.layers.observing import Observed
from switch_tf.metrics import RouterStats
from switch_tf.models.keras_methods import FeaturesModel
from switch_tf.models.stack import Cache, Stack
from switch_tf.ops import dtypes, forms, random
from switch_tf.partitioning.tensors import Tensor
from switch_tf.refusals import Refusal


class CrossCache(NamedTuple):
    """Cross-attention cache of all decoder layers.

    Attributes:
        layers: Cached keys and values of each layer.
        encoder_decoder_mask: <bool>[batch, 1, 1, encoder length].
    """

    layers: Cache
    encoder_decoder_mask: Tensor


@keras.saving.register_keras_serializable("switch_tf")
class SwitchTransformer(Observed, FeaturesModel):
    """T5 encoder-decoder, or encoder alone, with experts in some of its layers (arXiv 2101.03961).

    `model(features)` adds the weighted router losses with `add_loss`, so `compile` and `fit` minimise the paper's loss.
    `model.forward(features)` returns the router statistics instead.

    Args:
        config: SwitchConfig, or a dict of its fields, as stored in saved models.
        dtype: Keras dtype policy. "mixed_bfloat16", for accelerators, has float32 weights and bfloat16 compute.

    Call arguments:
        features: dict of <int32>[batch, length] by seqio name. Requires `encoder_input_tokens` and, with a decoder,
            `decoder_input_tokens`. The encoder's mask comes from `encoder_segment_ids`, or else from nonzero tokens.
            The decoder's comes from `decoder_segment_ids`, or else from nonzero `decoder_target_tokens`, or else all
            positions are real.
        training: bool.

    Returns: <float32>[batch, length, vocab_size], logits of the decoder, or of the encoder in a model without decoder.
    """

    def __init__(self, config: SwitchConfig | dict[str, Any], dtype: Any = None, name: str = "switch_transformer",
                 **kwargs: Any):
        with checks.arguments_of_keras():
            super().__init__(dtype=dtype, name=name, **kwargs)
        self.config = _as_config(config)
        config, policy = self.config, self.dtype_policy
        self.token_embedder = TokenEmbedding(config.vocab_size, config.d_model, dtype=policy, name="token_embedder")
        self.encoder = Stack(config, is_decoder=False, dtype=policy, name="encoder")
        self.decoder = None if config.is_encoder_only else Stack(config, True, dtype=policy, name="decoder")
        self._programs = collections.UserDict()  # of `generate`; TensorFlow would export those of a dict
        self.logits_dense = None if config.logits_via_embedding else LogitsDense(
            config.vocab_size, config.init_scale, dtype=policy, name="logits_dense")

    @classmethod
    def from_preset(cls, preset: str, dtype: Any = None, name: str = "switch_transformer",
                    **overrides: Any) -> "SwitchTransformer":
        """Returns a model with the configuration of a preset and initial weights.

        `conversion.from_hugging_face(folder)` loads pretrained weights.

        Args:
            preset: str. Name such as "switch_base_8". `switch-tf inspect --list` prints all of them.
            dtype, name: See the class.
            **overrides: Fields of SwitchConfig to change, such as `dropout_rate=0.1`.

        Raises:
            Refusal: an unknown preset or field, or a value out of range.
        """
        names = [field.name for field in dataclasses.fields(SwitchConfig)]
        for field in overrides:
            check_choice("A keyword of from_preset", field, ["dtype", "name", *names])
        is_preset = checks.text("preset", preset) in shipped_gin.preset_names()
        if not is_preset and pathlib.Path(preset).is_dir():
            raise Refusal(f"{preset!r} is a folder and no preset; for one of Hugging Face's form use "
                          f"switch_tf.conversion.from_hugging_face({preset!r}).")
        return cls(dataclasses.replace(SwitchConfig.from_preset(preset), **overrides), dtype=dtype, name=name)

    @property
    def required_features(self) -> tuple[str, ...]:
        """Names of the features that a call needs."""
        return ("encoder_input_tokens",) + ("decoder_input_tokens",) * (not self.config.is_encoder_only)

    @property
    def routers(self) -> dict[str, int]:
        """Number of experts by router name, see `Observed`."""
        return dict.fromkeys(self.config.sparse_layer_names, self.config.num_experts)

    @property
    def router_layers(self) -> tuple[Router, ...]:
        """The Routers, in the order of `config.sparse_layer_names`."""
        return self.encoder.router_layers + (() if self.decoder is None else self.decoder.router_layers)

    def build(self, input_shape: Any = None) -> None:
        hidden_shape = (None, None, self.config.d_model)
        for layer in (self.token_embedder, self.encoder, self.decoder, self.logits_dense):
            if layer is not None:
                layer.build(hidden_shape)

    def forward(self, features: dict[str, Tensor], training: bool = False) -> tuple[Tensor, tuple[RouterStats, ...]]:
        """Calls the model without adding losses and returns `(logits, router_stats)`.

        `router_stats` is a tuple of RouterStats in the order of `config.sparse_layer_names`.
        """
        return self(features, training=training, return_router_stats=True)

    def call(self, features: dict[str, Tensor], training: bool = False, return_router_stats: bool = False) -> Any:
        training = checks.flag("training", training)
        return_router_stats = checks.flag("return_router_stats", return_router_stats)
        features = self.read_features(features)
        with random.random_seed(random.fresh_seed() if training else None):
            logits, router_stats = self._run(features, training)
        if return_router_stats:
            return logits, router_stats
        self.observe(router_stats, training)
        for router, stats in zip(self.router_layers, router_stats, strict=True):
            if training:
                router.update_state(stats.expert_load)
            self.add_loss(losses.router_loss(stats, self.config.load_balancing_loss_weight,
                                             self.config.router_z_loss_weight))
        return logits

    def _run(self, features, training):
        is_real = masks.encoder_is_real(features)
        hidden, router_stats = self._encode(features, is_real, training)
        if self.decoder is not None:
            hidden, decoder_stats = self._decode(features, hidden, is_real, training)
            router_stats += decoder_stats
        return self._logits(hidden), router_stats

    def _encode(self, features, is_real, training):
        segments = features.get("encoder_segment_ids")
        mask = masks.key_mask(is_real) if segments is None else masks.attention_mask(segments, segments)
        tokens = features["encoder_input_tokens"]
        return self.encoder(self.token_embedder(tokens), is_real, mask, token_ids=tokens, training=training)

    def _decode(self, features, encoded, encoder_is_real, training):
        tokens = features["decoder_input_tokens"]
        segments = features.get("decoder_segment_ids")
        encoder_segments = features.get("encoder_segment_ids")
        decoder_segments = ops.ones_like(tokens) if segments is None else segments
        mask = masks.attention_mask(decoder_segments, decoder_segments, is_causal=True)
        if segments is None or encoder_segments is None:
            encoder_decoder_mask = masks.key_mask(encoder_is_real)
        else:
            encoder_decoder_mask = masks.attention_mask(segments, encoder_segments)
        if self.config.rules.masks_decoder_inputs and "decoder_target_tokens" in features:
            # As in Flaxformer, the position after the end of a sequence attends to all positions evenly.
            has_target = masks.query_mask(ops.not_equal(features["decoder_target_tokens"], 0))
            mask, encoder_decoder_mask = (ops.logical_and(one, has_target) for one in (mask, encoder_decoder_mask))
        return self.decoder(self.token_embedder(tokens), masks.decoder_is_real(features, self.config.rules), mask,
                            encoded, encoder_decoder_mask, token_ids=tokens, training=training)

    def _logits(self, hidden):
        if self.config.scales_logits:
            # In bfloat16 the factor for d_model = 768, and so every logit, would be off by 1/740.
            hidden = ops.cast(dtypes.widen(hidden) * self.config.d_model**-0.5, hidden.dtype)
        return self.token_embedder.attend(hidden) if self.logits_dense is None else self.logits_dense(hidden)

    def encode(self, features: dict[str, Tensor]) -> Tensor:
        """Runs the encoder alone, without dropout.

        Args:
            features: dict with `encoder_input_tokens`, <int32>[batch, length], padding 0.

        Returns:
            <compute dtype>[batch, length, d_model], the encoder's last hidden states, as in Hugging Face's
            T5EncoderModel. Values at padding are undefined.
        """
        if not self.built:
            self.build()
        return self._encode(features, masks.encoder_is_real(features), training=False)[0]

    def prefill(self, features: dict[str, Tensor], max_length: int) -> tuple[CrossCache, Cache]:
        """Encodes inputs and prepares the caches of `decode_step`.

        Args:
            features: dict with `encoder_input_tokens`, <int32>[batch, length], padding 0, not packed.
            max_length: int. Room for this many decoded tokens.

        Returns:
            `(cross_cache, cache)`: the cross-attention cache, which no step changes, and the empty self-attention
            cache.
        """
        is_real = masks.encoder_is_real(features)
        hidden, _ = self._encode(features, is_real, training=False)
        cross_cache = CrossCache(self.decoder.compute_cross_cache(hidden), masks.key_mask(is_real))
        return cross_cache, self.decoder.init_cache(ops.shape(hidden)[0], max_length)

    def decode_step(self, tokens: Tensor, is_real: Tensor, cache: Cache, position: Tensor,
                    cross_cache: CrossCache) -> tuple[Tensor, Cache]:
        """Computes the logits that follow one more token of each sequence.

        They equal the logits that `call` returns at `position` for the whole sequence.

        Args:
            tokens: <int32>[batch]. Token of each sequence at `position`. The first is 0, the start of a sequence.
            is_real: <bool>[batch], False where a sequence has ended. Its logits are undefined.
            cache: Self-attention cache from `prefill` or the previous step.
            position: <int32> scalar.
            cross_cache: Cross-attention cache from `prefill`.

        Returns:
            `(logits, cache)`: <float32>[batch, vocab_size] and the updated cache.
        """
        tokens = tokens[:, None]
        hidden, cache = self.decoder.decode_step(self.token_embedder(tokens), is_real[:, None], cache, position,
                                                 cross_cache.layers, cross_cache.encoder_decoder_mask, tokens)
        return self._logits(hidden)[:, 0], cache

    def generate(self, inputs: Any, max_length: int = 64, sampler: str | decoding.Sampler = "greedy",
                 end_id: int | tuple[int, ...] | None = None) -> Tensor:
        """Decodes output ids from input ids.

        Compiles one program for each sampler, batch size and input length, rounded up to a multiple of 32.

        Args:
            inputs: <int32>[batch, length] as a NumPy array, tensor or list. 0 is padding, before or after the ids.
            max_length: int. Maximum number of decoded tokens, including the end of sequence.
            sampler: "greedy", "sample", "beam" or a sampler, such as `switch_tf.decoding.Sample(top_p=0.9)`.
            end_id: int or tuple of int. Ids that end a sequence. Defaults to `SwitchConfig.end_id`.

        Returns:
            <int32>[batch, max_length], each sequence up to and including its end, then zeros. Beam search returns the
            best sequence; `sampler.decode` returns several with their scores.

        Raises:
            Refusal: inputs that are not ids of the vocabulary, or a model that cannot decode.
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
        decoding.check_decodes(self.config)
        if _holds_text(inputs):
            raise Refusal("inputs must be ids, <int32>[batch, length]; for texts use "
                          "switch_tf.inference.generate(model, texts, vocabulary).")
        try:
            inputs = np.asarray(ops.convert_to_numpy(inputs))
        except (ValueError, TypeError):
            raise Refusal("inputs must be ids, <int32>[batch, length], with 0 for padding where sequences are "
                          f"shorter, not {checks.shown(inputs)}.") from None
        checks.tensor("inputs", inputs, "int" if inputs.size else "number", (None, None))
        if not inputs.size:
            raise Refusal(f"inputs must hold ids, and these are <int>{list(inputs.shape)}: none at all.")
        checks.indices("Ids of inputs", inputs, self.config.vocab_size)
        return inputs.astype("int32")

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "config": dataclasses.asdict(self.config)}


def _holds_text(inputs) -> bool:
    """Returns whether inputs are text, or an array, tensor or list of text."""
    while isinstance(inputs, list | tuple) and inputs:
        inputs = inputs[0]
    dtype = str(getattr(getattr(inputs, "dtype", None), "name", getattr(inputs, "dtype", "")))
    return isinstance(inputs, str | bytes) or dtype.startswith(("str", "bytes", "object"))


def _as_config(config):
    """Returns a SwitchConfig from a SwitchConfig or a dict of its fields."""
    if isinstance(config, SwitchConfig):
        return config
    names = [field.name for field in dataclasses.fields(SwitchConfig)]
    if not isinstance(config, dict):
        raise Refusal(f"config must be a SwitchConfig, or a dictionary of its fields, not {checks.shown(config)}.")
    for name in config:
        check_choice("A field of a SwitchConfig", name, names)
    return SwitchConfig(**config)
