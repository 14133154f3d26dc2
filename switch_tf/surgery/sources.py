"""Choice and comparison of checkpoints and configurations that models are made from. Needs no TensorFlow."""

import dataclasses
from typing import Any

from switch_tf import checks
from switch_tf.checkpoints import continuation, folders
from switch_tf.checkpoints.run_folder import select, select_one
from switch_tf.configs import policies
from switch_tf.configs.switch_config import SwitchConfig
from switch_tf.conversion import formats
from switch_tf.conversion.formats import Format
from switch_tf.refusals import Refusal

# Fields of shape or meaning that experts do not change.
_SAME = ("vocab_size", "d_model", "d_ff", "d_kv", "num_heads", "num_encoder_layers", "num_decoder_layers", "activation",
         "logits_via_embedding", "scales_logits", "layer_norm_epsilon", "relative_attention_num_buckets",
         "relative_attention_max_distance", "relative_attention_per_layer")


def checkpoint_in(source: Any, source_format: Format) -> Any:
    """Returns the newest checkpoint of a run folder, and any other folder of weights unchanged."""
    if source_format is not formats.SWITCH_TF or (source / folders.DESCRIPTION).exists():
        return source
    return select_one(source, "last")


def newest(run_folder: Any, count: int) -> list[Any]:
    """Returns the newest checkpoints of a run, oldest first."""
    if not (run_folder / "checkpoints").is_dir():
        raise Refusal(f"--run must name a run folder, which holds checkpoints; {str(run_folder)!r} does not.")
    checkpoints = select(run_folder, "all")
    if len(checkpoints) < count:
        raise Refusal(f"--last must be at most {len(checkpoints)}, the number of checkpoints in {str(run_folder)!r}, "
                      f"not {count}; a run keeps more of them with --gin.Run.keep_checkpoints=N.")
    return checkpoints[-count:]


def check_same(checkpoints: list[Any]) -> None:
    """Refuses checkpoints of different models."""
    first, *later = checkpoints
    wanted = folders.describe(first)
    for checkpoint in later:
        description = folders.describe(checkpoint)
        difference = continuation.model_difference(wanted["configuration"], description["configuration"])
        old, new = ({path: saved["shape"] for path, saved in one["variables"].items() if path.startswith(folders.MODEL)}
                    for one in (wanted, description))
        for path in old | new:
            if not difference and old.get(path) != new.get(path):
                difference = f"{path} was {old.get(path, 'not there')} and is {new.get(path, 'not there')}"
        if difference:
            raise Refusal(f"{checkpoint} is of another model than {first}: {difference}. Average checkpoints of one "
                          "model.")


def dense_twin(config: SwitchConfig) -> SwitchConfig:
    """Returns a configuration without its experts."""
    return dataclasses.replace(config, num_experts=0)


def check_compatible(dense: SwitchConfig, sparse: SwitchConfig) -> int:
    """Checks that dense weights fit into a sparse model. Returns d_ff over the width of the experts."""
    if dense.num_experts:
        raise Refusal(f"--from must be a dense model, with num_experts=0, and its num_experts is {dense.num_experts}; "
                      "a sparse one is trained further with INITIAL_CHECKPOINT.")
    if not sparse.sparse_layer_names:
        raise Refusal(f"The model file must describe a model with sparse layers, and its num_experts is "
                      f"{sparse.num_experts}; give gin/models/switch_base_8.gin, or another one with experts.")
    for name in _SAME:
        values = getattr(dense, name), getattr(sparse, name)
        if values[0] != values[1]:
            shown = "scale_decoder_outputs" if name == "scales_logits" else name
            raise Refusal(f"{shown} must be the same in both models, and it is {values[0]!r} in "
                          f"--from and {values[1]!r} in the model file; only experts and routers may differ.")
    for field, wanted in (("extra_mlp", False), ("expert_sublayers", "feed_forward")):
        if (value := getattr(sparse, field)) != wanted:
            raise Refusal(f"{field} must be {wanted!r}, not {value!r}: a dense model has no weights for these layers.")
    width = sparse.expert_width
    if dense.d_ff % width or sparse.num_experts % (dense.d_ff // width):
        raise Refusal(f"expert_d_ff must be d_ff / k, for a k that divides d_ff ({dense.d_ff}) and num_experts "
                      f"({sparse.num_experts}), not {width}; leave it out for experts as wide as the dense layer.")
    return dense.d_ff // width


def reduce_experts(config: SwitchConfig, num_experts: int) -> SwitchConfig:
    """Returns the configuration of a sparse model with fewer experts in each layer."""
    checks.integer("--num_experts", num_experts, 1)
    if not config.sparse_layer_names or num_experts >= config.num_experts:
        raise Refusal(f"--num_experts must be below the experts of a layer of --from, {config.num_experts}, not "
                      f"{num_experts}.")
    for name, layers in ((config.routing_policy, config.encoder_sparse_layers),
                         (config.decoder_policy, config.decoder_sparse_layers)):
        if layers and not policies.get(name).has_scores:
            raise Refusal(f"The {name} policy assigns tokens to experts by number, so its experts cannot be fewer "
                          "without other tokens for each; shrink a model that learns its routes.")
    return dataclasses.replace(config, num_experts=num_experts)
