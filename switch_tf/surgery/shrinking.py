"""Models with fewer experts: the most used ones of each layer, or merged ones."""

import math
import pathlib
import warnings

import numpy as np
from scipy.cluster import hierarchy
from scipy.spatial import distance

from switch_tf import data
from switch_tf.checkpoints import folders, tensors
from switch_tf.configs.experiment import Experiment
from switch_tf.conversion import own, source_vocabulary
from switch_tf.conversion.formats import start_from
from switch_tf.conversion.weight_source import variables_of
from switch_tf.evaluation import split_evaluator
from switch_tf.models.switch_transformer import SwitchTransformer
from switch_tf.partitioning import axes_of
from switch_tf.reporting import progress
from switch_tf.surgery import sources

Groups = list[list[int]]  # of experts; a smaller layer has one expert for each


def most_used(use: np.ndarray, count: int) -> Groups:
    """Returns the most used experts, each a group of its own, in ascending order.

    `use` is <float>[num_experts], shares of the tokens. Of equally used experts the first is taken.
    """
    return [[int(expert)] for expert in sorted(np.argsort(-use, kind="stable")[:count])]


def most_similar(kernels: list[np.ndarray], count: int) -> Groups:
    """Joins the most similar experts until `count` groups are left, in the order of their first experts.

    Clusters by average linkage (HC-SMoE, arXiv 2410.08589) of the cosine distance of all kernels, because kernels are
    averaged. Each of `kernels` is <float>[num_experts, ...].
    """
    products = sum(flat @ flat.T for flat in (kernel.reshape(len(kernel), -1) for kernel in kernels))
    norms = np.sqrt(np.maximum(np.diag(products), np.finfo(np.float32).tiny))
    distances = np.clip(1 - products / np.outer(norms, norms), 0, None).astype(np.float64)
    np.fill_diagonal(distances, 0)
    tree = hierarchy.linkage(distance.squareform(distances, checks=False), "average")
    labels = hierarchy.cut_tree(tree, n_clusters=count).ravel()
    return sorted(np.flatnonzero(labels == label).tolist() for label in np.unique(labels))


def groups_of(model: SwitchTransformer, num_experts: int, use: dict[str, np.ndarray],
              is_merged: bool) -> dict[str, Groups]:
    """Returns router -> groups of experts."""
    if not is_merged:
        return {router: most_used(of_router, num_experts) for router, of_router in use.items()}
    variables = variables_of(model)
    return {router: most_similar([variable.numpy().astype(np.float32) for name, variable in variables.items()
                                  if name.startswith(f"{place}experts/")], num_experts)
            for router, place in _router_places(model).items()}


def _router_places(model):
    """Returns router -> prefix of the names of its layer's weights."""
    return {name: router.path.removeprefix(f"{model.name}/").removesuffix("router")
            for name, router in zip(model.config.sparse_layer_names, model.router_layers, strict=True)}


def shrink(model: SwitchTransformer, groups: dict[str, Groups], use: dict[str, np.ndarray]) -> SwitchTransformer:
    """Makes a model with one expert for each group: the mean of its experts and router columns, weighted by use.

    Args:
        groups: By router, the same number for all.
        use: <float>[num_experts] by router, shares of the tokens.
    """
    num_experts = len(next(iter(groups.values())))
    smaller = SwitchTransformer(sources.reduce_experts(model.config, num_experts), dtype=model.dtype_policy)
    smaller.build()
    old, routers = variables_of(model), _router_places(model)
    with progress.bar(4 * smaller.config.num_parameters, "shrinking") as bar:
        for name, variable in variables_of(smaller).items():
            weight, axes = old[name].numpy(), axes_of(old[name])
            axis = next((dim for dim, one in enumerate(axes) if one in ("expert", "router_expert")), None)
            if axis is not None:
                parts, router = [], next(router for router, place in routers.items() if name.startswith(place))
                for group in groups[router]:
                    shares = use[router][group]
                    parts.append(np.average(np.take(weight, group, axis).astype(np.float64), axis=axis,
                                            weights=shares if shares.sum() > 0 else np.ones(len(group))))
                weight = np.stack(parts, axis).astype(weight.dtype)
            variable.assign(weight)
            bar.update(4 * math.prod(variable.shape))
    return smaller


def shrink_checkpoint(checkpoint: pathlib.Path, output: pathlib.Path, described: Experiment, num_experts: int,
                      is_merged: bool) -> tuple[dict, str]:
    """Shrinks the model of a run's checkpoint, and measures the held-out loss before and after.

    Losses are means over at most `Run.eval_batches` validation batches, with the evaluation capacity factor.

    Args:
        output: New or empty folder.
        described: The run of the checkpoint, on one device.
        is_merged: Whether to merge the most similar experts. Otherwise the most used are kept.

    Returns:
        (JSON object, text for people).
    """
    run, config = described.run, described.config
    folders.check_size(config, checkpoint)
    data.check_vocabulary(run.mixture_or_task_name, config.vocab_size, run.vocabulary)
    description = data.description_of_data(run, config, "validation", 0)
    batches = data.get_dataset(description).take(run.eval_batches).cache()

    def measure(model):
        step = split_evaluator.compile_evaluation(model, described.settings, described.partitioner)
        with warnings.catch_warnings(), progress.bar(
                run.eval_batches, f"evaluating {model.config.num_experts} experts", " batches") as bar:
            warnings.filterwarnings("ignore", "You are using a softmax over axis")  # by Keras, of a single expert
            measured = split_evaluator.evaluate(step, batches, description, lambda count: bar.update())
        loss = measured.loss_terms["cross_entropy"]
        return float(loss.total / (loss.weight or 1.0)), {
            router: stats.expert_load.total / (stats.expert_load.weight or 1.0)
            for router, stats in measured.routers.items()}

    model = described.make_model()
    described.partitioner.build(model, draws_weights=False)
    step = tensors.restore(checkpoint, tensors.state_variables(model))["step"]
    before, use = measure(model)
    groups = groups_of(model, num_experts, use, is_merged)
    smaller = shrink(model, groups, use)
    after, _ = measure(smaller)
    vocabulary = source_vocabulary.find(checkpoint)
    own.to_switch_tf(smaller, output, vocabulary.content)
    name, lines = start_from(output, vocabulary)
    result = {"from": str(checkpoint), "step": step, "output": str(output), "method": ("most_used", "merge")[is_merged],
              "num_experts": {"before": model.config.num_experts, "after": num_experts},
              "num_parameters": {"before": model.config.num_parameters, "after": smaller.config.num_parameters},
              "loss": {"before": before, "after": after},
              "layers": {router: {"use": use[router].tolist(), "groups": groups[router]} for router in groups},
              "vocabulary": name}
    return result, "\n".join([describe(result), *lines])


def describe(result: dict) -> str:
    """Describes a result of `shrink_checkpoint`."""
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
