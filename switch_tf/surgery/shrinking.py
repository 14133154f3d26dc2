"""Models with fewer experts: the most used ones of each layer, or merged ones."""

import math
import pathlib

import numpy as np

from switch_tf.checkpoints import sizes, tensors
from switch_tf.configs.experiment import Experiment
from switch_tf.conversion import own, source_vocabulary
from switch_tf.conversion.converting import start_from
from switch_tf.conversion.weight_source import variables_of
from switch_tf.models.switch_transformer import SwitchTransformer
from switch_tf.reporting import progress
from switch_tf.surgery import compatibility, expert_groups, held_out
from switch_tf.surgery.expert_groups import Groups


def shrink(model: SwitchTransformer, groups: dict[str, Groups], use: dict[str, np.ndarray]) -> SwitchTransformer:
    """Makes a model in which each group of experts is one expert, the mean of the group weighted by use.

    So is its column of the router.

    Args:
        model: SwitchTransformer with experts.
        groups: Name of a router -> groups of experts, the same number for all.
        use: Name of a router -> <float>[num_experts], share of the tokens.
    """
    num_experts = len(next(iter(groups.values())))
    smaller = SwitchTransformer(compatibility.with_fewer_experts(model.config, num_experts), dtype=model.dtype_policy)
    smaller.build()
    old, routers = variables_of(model), _router_places(model)
    with progress.bar(4 * smaller.config.num_parameters, "shrinking") as bar:
        for name, variable in variables_of(smaller).items():
            weight = old[name].numpy()
            for router, place in routers.items():
                if name.startswith((f"{place}experts/", f"{place}router/")):
                    axis = 1 if name == f"{place}router/kernel" else 0
                    weight = _merged(weight, axis, groups[router], use[router])
            variable.assign(weight)
            bar.update(4 * math.prod(variable.shape))
    return smaller


def _router_places(model):
    """Returns name of a router -> beginning of the names of its layer's weights."""
    names = {id(variable): name for name, variable in variables_of(model).items()}
    return {name: names[id(router.kernel)].removesuffix("router/kernel")
            for name, router in zip(model.config.sparse_layer_names, model.router_layers, strict=True)}


def _merged(weight, axis, groups, use):
    """Averages entries of a weight along an axis, group by group."""
    parts = []
    for group in groups:
        shares = use[group] if use[group].sum() > 0 else np.ones(len(group))
        parts.append(np.average(np.take(weight, group, axis).astype(np.float64), axis=axis, weights=shares))
    return np.stack(parts, axis).astype(weight.dtype)


def _groups(model, num_experts, use, is_merged):
    """Returns name of a router -> groups of experts."""
    if not is_merged:
        return {router: expert_groups.most_used(of_router, num_experts) for router, of_router in use.items()}
    variables = variables_of(model)
    return {router: expert_groups.most_similar(
        [variable.numpy().astype(np.float32) for name, variable in variables.items()
         if name.startswith(f"{place}experts/")], num_experts)
        for router, place in _router_places(model).items()}


def shrink_checkpoint(checkpoint: pathlib.Path, output: pathlib.Path, described: Experiment, num_experts: int,
                      is_merged: bool) -> tuple[dict, str]:
    """Shrinks the model of a checkpoint of a run, and measures the held-out loss before and after.

    Args:
        checkpoint: Checkpoint folder.
        output: New or empty folder.
        described: The run of the checkpoint, on one device.
        num_experts: Experts of each layer that are left.
        is_merged: Whether the most similar experts are merged. Otherwise the most used ones are kept.

    Returns:
        (JSON object, text for people).

    Raises:
        Refusal: The checkpoint is damaged or of another model, the task has no held-out examples, or the folder cannot
            be written.
    """
    sizes.check(described.config, checkpoint)
    batches = held_out.batches_of(described)
    model = described.make_model()
    described.partitioner.build(model)
    step = tensors.restore(checkpoint, tensors.state_variables(model))["step"]
    before = held_out.measure(model, batches, described, f"{model.config.num_experts} experts")
    groups = _groups(model, num_experts, before.use, is_merged)
    smaller = shrink(model, groups, before.use)
    after = held_out.measure(smaller, batches, described, f"{num_experts} experts")
    vocabulary = source_vocabulary.find(checkpoint)
    own.to_switch_tf(smaller, output, vocabulary.content)
    name, lines = start_from(output, vocabulary)
    result = {"from": str(checkpoint), "step": step, "output": str(output), "method": ("most_used", "merge")[is_merged],
              "num_experts": {"before": model.config.num_experts, "after": num_experts},
              "num_parameters": {"before": model.config.num_parameters, "after": smaller.config.num_parameters},
              "loss": {"before": before.loss, "after": after.loss},
              "layers": {router: {"use": before.use[router].tolist(), "groups": groups[router]} for router in groups},
              "vocabulary": name}
    return result, "\n".join([describe(result), *lines])


def describe(result: dict) -> str:
    """Returns the losses, and a line for each router, of a result of `shrink_checkpoint`."""
    experts, parameters, loss = result["num_experts"], result["num_parameters"], result["loss"]
    lines = [f"{parameters['before']:,} parameters of {result['from']} became {parameters['after']:,} in "
             f"{result['output']}.",
             f"Held-out loss: {loss['before']:.4f} with {experts['before']} experts a layer, {loss['after']:.4f} with "
             f"{experts['after']}."]
    width = max(map(len, result["layers"]))
    for router, layer in result["layers"].items():
        shown = ", ".join(f"{'+'.join(map(str, group))} ({100 * sum(layer['use'][expert] for expert in group):.0f} %)"
                          for group in layer["groups"])
        lines.append(f"  {router:<{width}}  {shown}")
    return "\n".join(lines)
