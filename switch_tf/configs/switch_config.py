"""The configuration of a model: a validated dataclass without TensorFlow."""

import collections
import dataclasses
from collections.abc import Iterator

from etils import epy

from switch_tf import checks
from switch_tf.configs import accounting, parts, policies, shipped_gin
from switch_tf.configs.choices import RULES, check_fields, nearest
from switch_tf.configs.semantics import Grouping, Rules, rules_of
from switch_tf.refusals import Refusal

with epy.lazy_imports():  # imports gin
    from switch_tf.configs import gin_syntax

MOST_LAYERS = 10_000


@dataclasses.dataclass(frozen=True)
class SwitchConfig:
    """Sizes and rules of a T5 (`num_experts=0`) or Switch Transformer (arXiv 2101.03961).

    Args:
        vocab_size: Rows of the embedding, at least the vocabulary's size.
        d_model, d_ff, d_kv: Widths of the residual stream, of feed-forward layers and of one attention head.
        num_encoder_layers, num_decoder_layers: Without decoder layers the encoder computes the logits.
        activation: "relu" (T5 1.0), "geglu" (T5 1.1) or another, see `layers.FeedForward`.
        logits_via_embedding: Whether logits share the embedding (T5 1.0) or have their own weights (T5 1.1).
        scale_decoder_outputs: Whether to multiply the last hidden state by d_model^-0.5. None does so if logits share
            the embedding, as in T5.
        end_id: Ids where `generate` stops, () for none. Functions that return text use the vocabulary's own.
        dropout_rate: In [0, 1). One mask for all positions of a sequence.
        layer_norm_epsilon: Added to the mean square in RMS norms.
        relative_attention_num_buckets, relative_attention_max_distance: T5's relative position bias.
        relative_attention_per_layer: Each layer, not stack, has its own position bias, as in umT5 and scanned T5X
            models.
        init_scale: Feed-forward, expert, router and logit kernels start truncated normal with standard deviation
            sqrt(init_scale / fan_in). 0.1 in the paper (section 2.4), 1.0 in T5.
        attention_init_scale: The same for attention kernels, 1.0 in T5 and Mesh TensorFlow.
        num_experts: Experts of each sparse layer. 0 is a dense model.
        expert_d_ff: Width of the experts. None for d_ff.
        encoder_sparse_step, decoder_sparse_step: Layer i is sparse if i % step == step - 1. 0 for none.
        encoder_sparse_indices, decoder_sparse_indices: Ascending indices of sparse layers instead of a step, () for
            none.
        group_size: Largest number of tokens per group. Tokens of a group compete for slots.
        num_groups_multiple: Divides the number of groups, so that splitting the batch into as many parts (devices,
            microbatches) splits no group.
        train_capacity_factor, eval_capacity_factor: Slots of an expert over tokens per expert (equation 3).
        min_expert_capacity: Smallest number of slots, limited by the tokens of a group.
        routing_policy: See `layers.Router` and `policies.register`.
        decoder_routing_policy: None for the encoder's policy.
        allow_non_causal_decoder: Allows a decoder policy that reads later tokens (all but "switch" and "hash").
            Generation lacks them.
        num_selected_experts: Experts per token. None for the policy's default (2 for "top2", else 1).
        exploration: "input_jitter", "argmax", "input_dropout" or "sample" (appendix C), see `layers.Router`.
        jitter_noise: In [0, 1). "input_jitter" multiplies the router's training inputs by uniform numbers from 1 -
            jitter_noise to 1 + jitter_noise.
        second_expert_policy: Later choices that "top2" and "top_n" carry out, one of SECOND_EXPERT_POLICIES.
        second_expert_threshold: In (0, 1). Used by "random" and "threshold".
        second_place_loss_weight: Relative weight of the second choices' balance loss.
        expert_dropout_rate: In [0, 1). Elementwise dropout inside experts (section 4; 0.4 for fine-tuning).
        router_dtype: "float32" (selective precision, section 2.4) or "bfloat16".
        load_balancing_loss_weight, router_z_loss_weight: Weights of each sparse layer's losses.
        extra_mlp: Adds a dense feed-forward layer, with norm and residual, after each Switch layer (ST-MoE).
        expert_sublayers: "feed_forward", "attention" or "feed_forward_and_attention". In self-attention, one set of
            experts computes queries and a second set shared keys and values (appendix A).
        attention_expert_dtype: "float32", because attention experts diverge in bfloat16 (Table 10), or "auto" for the
            model's dtype.
        semantics: "switch_tf", or the grouping, capacity and loss rules of Mesh TensorFlow ("mtf"), T5X ("t5x") or
            Hugging Face ("hf").
        expert_capacity: Slots per expert and sequence, required by semantics "hf" and only valid there.
        dispatch: "einsum" (GShard), "index" (gathers), "ragged" (gathers without empty slots), or "auto" by device and
            load. All agree up to rounding.
        remat: Recomputes each layer's activations in the backward pass.
    """

    vocab_size: int = 32128
    d_model: int = 512
    d_ff: int = 2048
    d_kv: int = 64
    num_heads: int = 8
    num_encoder_layers: int = 6
    num_decoder_layers: int = 6
    activation: str = "relu"
    logits_via_embedding: bool = True
    scale_decoder_outputs: bool | None = None
    end_id: int | tuple[int, ...] = 1
    dropout_rate: float = 0.1
    layer_norm_epsilon: float = 1e-6
    relative_attention_num_buckets: int = 32
    relative_attention_max_distance: int = 128
    relative_attention_per_layer: bool = False
    init_scale: float = 1.0
    attention_init_scale: float = 1.0
    num_experts: int = 0
    expert_d_ff: int | None = None
    encoder_sparse_step: int = 2
    decoder_sparse_step: int = 2
    encoder_sparse_indices: tuple[int, ...] | None = None
    decoder_sparse_indices: tuple[int, ...] | None = None
    group_size: int = 4096
    num_groups_multiple: int = 1
    train_capacity_factor: float = 1.25
    eval_capacity_factor: float = 2.0
    min_expert_capacity: int = 4
    routing_policy: str = "switch"
    decoder_routing_policy: str | None = None
    allow_non_causal_decoder: bool = False
    num_selected_experts: int | None = None
    exploration: str = "input_jitter"
    jitter_noise: float = 0.01
    second_expert_policy: str = "random"
    second_expert_threshold: float = 0.2
    second_place_loss_weight: float = 0.0
    expert_dropout_rate: float = 0.0
    router_dtype: str = "float32"
    load_balancing_loss_weight: float = 1e-2
    router_z_loss_weight: float = 1e-3
    extra_mlp: bool = False
    expert_sublayers: str = "feed_forward"
    attention_expert_dtype: str = "float32"
    semantics: str = "switch_tf"
    expert_capacity: int | None = None
    dispatch: str = "auto"
    remat: bool = False

    def __post_init__(self):
        check_fields(self, RULES | {"num_experts": 0})
        for stack in ("encoder", "decoder"):
            name, num_layers = f"{stack}_sparse_indices", getattr(self, f"num_{stack}_layers")
            if num_layers > MOST_LAYERS:
                raise Refusal(f"num_{stack}_layers must be at most {MOST_LAYERS}, not {num_layers}.")
            if (indices := getattr(self, name)) is None:
                continue
            if not isinstance(indices, list | tuple):
                raise Refusal(f"{name} must be a tuple of the indices of layers, not {checks.shown(indices)}.")
            indices = tuple(checks.integer(f"Each index of {name}", index, 0) for index in indices)
            if list(indices) != sorted(set(indices)) or (indices and indices[-1] >= num_layers):
                raise Refusal(f"{name} must list different layers from 0 to {num_layers - 1} in ascending order, not "
                              f"{indices}.")
            object.__setattr__(self, name, indices)
        checks.fields(self, ("end_id",), checks.ids, self.vocab_size)
        rules_of(self.semantics)
        if self.extra_mlp and not self.has_feed_forward_experts:
            raise Refusal("extra_mlp=True needs feed-forward layers of experts; expert_sublayers='attention' has "
                          "none. Use expert_sublayers='feed_forward_and_attention' or extra_mlp=False.")
        encoder_policy = policies.get(self.routing_policy)
        decoder_policy = policies.get(self.decoder_policy, "decoder_routing_policy")
        for policy, number in ((encoder_policy, self.num_selected_experts), (decoder_policy, self.routing(True)[1])):
            policies.check_options(policy, number, self.num_experts, self.exploration)
        if self.second_place_loss_weight and all(self.num_choices(stack) < 2 for stack in (False, True)):
            raise Refusal(f"second_place_loss_weight={self.second_place_loss_weight} needs a policy with second "
                          f"choices, such as 'top2', not {self.routing_policy!r}.")
        if self.dispatch == "ragged" and (encoder_policy.experts_choose or decoder_policy.experts_choose):
            raise Refusal("dispatch='ragged' leaves out empty slots, and where experts choose there are none; use "
                          "'index' or 'auto'.")
        if self.decoder_sparse_layers and not decoder_policy.is_causal and not self.allow_non_causal_decoder:
            raise Refusal(
                f"A decoder cannot be routed by {self.decoder_policy!r}, which lets later tokens change earlier ones; "
                "use decoder_routing_policy='switch', or allow_non_causal_decoder=True to train it nevertheless.")
        if self.relative_attention_max_distance <= self.relative_attention_num_buckets // 2:
            raise Refusal(
                f"relative_attention_max_distance must be above half of relative_attention_num_buckets "
                f"({self.relative_attention_num_buckets // 2}), not {self.relative_attention_max_distance}.")
        object.__setattr__(self, "expert_capacity", self.grouping.expert_capacity)  # checked there

    @classmethod
    def from_preset(cls, name: str) -> "SwitchConfig":
        """Reads `gin/models/<name>.gin`. Leaves gin's global configuration unchanged."""
        names = shipped_gin.preset_names()
        if checks.text("The name of a preset", name) not in names:
            raise Refusal(f"There is no preset {name!r}.{nearest(name, names)} The presets are the files of "
                          "gin/models; `switch-tf inspect --list` names them all.")
        gin = gin_syntax.Gin()
        gin.read_file(f"gin/models/{name}.gin", [str(shipped_gin.folder())])  # ignores the working directory
        return gin.part(parts.CONFIG).make()

    @property
    def is_encoder_only(self) -> bool:
        return self.num_decoder_layers == 0

    @property
    def axis_sizes(self) -> dict[str, int]:
        """Sizes of the logical axes that a layout may split."""
        sizes = {"vocab": self.vocab_size, "embed": self.d_model, "heads": self.num_heads, "kv": self.d_kv,
                 "mlp": self.d_ff}
        if self.num_experts:
            sizes |= {"expert": self.num_experts, "expert_embed": self.d_model, "expert_mlp": self.expert_width}
        return sizes

    @property
    def scales_logits(self) -> bool:
        """Whether to multiply the last hidden state by d_model^-0.5 before the logits."""
        return self.logits_via_embedding if self.scale_decoder_outputs is None else self.scale_decoder_outputs

    @property
    def grouping(self) -> Grouping:
        """The Grouping of sparse layers. A dense model's only checks its fields."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(Grouping)}
        if not self.num_experts:
            fields |= {"num_experts": 1, "semantics": "switch_tf"}
        return Grouping(**fields)

    @property
    def rules(self) -> Rules:
        """The rules of `semantics`."""
        return rules_of(self.semantics)

    @property
    def expert_width(self) -> int:
        """Hidden width of the experts."""
        return self.d_ff if self.expert_d_ff is None else self.expert_d_ff

    @property
    def encoder_sparse_layers(self) -> tuple[int, ...]:
        """Indices of the encoder's sparse layers."""
        return self._sparse_layers(self.num_encoder_layers, self.encoder_sparse_step, self.encoder_sparse_indices)

    @property
    def decoder_sparse_layers(self) -> tuple[int, ...]:
        """Indices of the decoder's sparse layers."""
        return self._sparse_layers(self.num_decoder_layers, self.decoder_sparse_step, self.decoder_sparse_indices)

    def _sparse_layers(self, num_layers, step, indices):
        if not self.num_experts:
            return ()
        if indices is not None:
            return indices
        return self.rules.sparse_layers(num_layers, step) if step else ()

    @property
    def decoder_policy(self) -> str:
        return self.routing_policy if self.decoder_routing_policy is None else self.decoder_routing_policy

    def routing(self, is_decoder: bool) -> tuple[str, int | None]:
        """Returns `(policy, num_selected_experts)` of a stack. The number belongs to `routing_policy`."""
        policy = self.decoder_policy if is_decoder else self.routing_policy
        return policy, self.num_selected_experts if policy == self.routing_policy else None

    def num_choices(self, is_decoder: bool) -> int:
        """Returns a stack's number of experts per token."""
        policy, num_selected_experts = self.routing(is_decoder)
        return policies.get(policy).count(num_selected_experts)

    @property
    def has_attention_experts(self) -> bool:
        """Whether sparse layers have experts in self-attention."""
        return self.expert_sublayers != "feed_forward"

    @property
    def has_feed_forward_experts(self) -> bool:
        """Whether sparse layers have experts in the feed-forward layer."""
        return self.expert_sublayers != "attention"

    @property
    def sparse_layer_names(self) -> tuple[str, ...]:
        """Names of the routers, in the order of the model's statistics: "encoder/layers_1", ...

        Attention experts have "encoder/layers_1/attention/query" and "encoder/layers_1/attention/key_value".
        """
        routers = ("/attention/query", "/attention/key_value") if self.has_attention_experts else ()
        routers += ("",) if self.has_feed_forward_experts else ()
        return tuple(f"{stack}/layers_{i}{router}"
                     for stack, layers in (("encoder", self.encoder_sparse_layers),
                                           ("decoder", self.decoder_sparse_layers))
                     for i in layers for router in routers)

    def weights(self) -> Iterator[accounting.Weight]:
        """Yields the weights of the model by kind."""
        return accounting.weights(self)

    def parameters_by_part(self) -> dict[str, int]:
        """Counts parameters by part: "embedding", "attention", "experts", ... Omits empty parts."""
        sizes = collections.Counter()
        for weight in self.weights():
            sizes[weight.part] += weight.size
        return dict(+sizes)

    @property
    def num_parameters(self) -> int:
        return sum(self.parameters_by_part().values())

    def flops_by_part(self, inputs_length: int = 512, targets_length: int = 114) -> dict[str, int]:
        """Counts the FLOPs of one sequence's forward pass, see `accounting.flops_by_part`."""
        return accounting.flops_by_part(self, checks.integer("inputs_length", inputs_length, 0),
                                        checks.integer("targets_length", targets_length, 0))

    def flops_per_sequence(self, inputs_length: int = 512, targets_length: int = 114) -> int:
        """Counts the FLOPs of the weight products in one sequence's forward pass (Table 9 of the paper)."""
        parts = self.flops_by_part(inputs_length, targets_length)
        return sum(parts[part] for part in ("attention", "feed_forward", "experts", "router"))
