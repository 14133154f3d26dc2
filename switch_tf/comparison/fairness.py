"""Checks that runs can be compared: same data, same rules, same work per token. Needs no TensorFlow."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from switch_tf.checkpoints import continuation
from switch_tf.comparison import differences
from switch_tf.configs.choices import nearest
from switch_tf.configs.run import Run
from switch_tf.configs.switch_config import SwitchConfig
from switch_tf.refusals import Refusal

_TOLERANCE = 0.02
# Names of `continuation.record` in which variants may differ: model, optimizer and seed.
_FREE = ("SwitchConfig.", "SwitchTransformer.", "SEED")
# Names that must agree for two losses to be comparable.
_OF_LOSSES = ("MIXTURE_OR_TASK_NAME", "TASK_FEATURE_LENGTHS", "Run.eval_batches", "held-out data", "vocabulary")


class Work(NamedTuple):
    """FLOPs of a forward pass per token, averaged over a sequence of the run's lengths.

    `flops_per_token`: FLOPs of products with weights, router included, see `SwitchConfig.flops_per_sequence`.
    `router_flops_share`: Share of the router in them.
    `capacity_padding_share`: Additional FLOPs of experts for empty slots, divided by `flops_per_token`.
    """

    flops_per_token: float
    router_flops_share: float
    capacity_padding_share: float


def work(config: SwitchConfig, task_feature_lengths: dict) -> Work:
    """Returns the work of a configuration's model for the lengths of "inputs" and "targets" in tokens."""
    inputs = task_feature_lengths["inputs"]
    targets = 0 if config.is_encoder_only else task_feature_lengths["targets"]
    flops = config.flops_per_sequence(inputs, targets)
    parts = config.flops_by_part(inputs, targets)
    return Work(flops / (inputs + targets), parts["router"] / flops, parts["capacity_padding"] / flops)


def baseline(configs: dict[str, Any]) -> str:
    """Returns the name of the variant to compare with: the first one without experts, else the first one."""
    return next((name for name, config in configs.items() if not config.num_experts), next(iter(configs)))


def check_run(run: Run) -> None:
    """Checks that a Run trains to its last step and has held-out losses.

    Raises:
        Refusal: names the macro of gin/runs to set.
    """
    if run.patience:
        raise Refusal(f"a comparison trains all variants to the last step; leave PATIENCE at 0, not {run.patience}.")
    if not run.eval_period:
        raise Refusal("a comparison is one of held-out losses; set EVAL_PERIOD above 0.")


def check_work(configs: dict[str, Any], task_feature_lengths: dict, unequal_work: Sequence[str] = ()) -> None:
    """Checks that the work of all variants per token, without the router, is the baseline's.

    Args:
        configs: dict, name of a variant -> SwitchConfig.
        task_feature_lengths: dict, "inputs" and "targets" in tokens.
        unequal_work: Names of variants that may differ.

    Raises:
        Refusal: names the variant, with both numbers.
    """
    reference = baseline(configs)
    wanted = _without_router(work(configs[reference], task_feature_lengths))
    for name, config in configs.items():
        flops = _without_router(work(config, task_feature_lengths))
        if abs(flops / wanted - 1) > _TOLERANCE and name not in unequal_work:
            raise Refusal(f"{name!r} does {flops:,.0f} FLOPs a token without its router and {reference!r} does "
                          f"{wanted:,.0f}, {flops / wanted - 1:+.1%}; they may differ by {_TOLERANCE:.0%}. Match "
                          f"them by d_ff, or allow it with Comparison.unequal_work=[{name!r}].")


def _without_router(cost):
    return cost.flops_per_token * (1 - cost.router_flops_share)


def check_records(records: dict[str, dict], may_differ: Sequence[str] = ()) -> None:
    """Checks that the runs of variants differ in model, optimizer and seed alone.

    Args:
        records: dict, name of a variant -> `continuation.record` of its run.
        may_differ: Names of a record that may differ.

    Raises:
        Refusal: names the entry that differs, with both values.
    """
    (first, wanted), *others = records.items()
    for key in may_differ:
        if key not in _compared(wanted):
            raise Refusal(f"Comparison.may_differ names {key!r}; what may differ are "
                          f"{', '.join(_compared(wanted))}.{nearest(key, _compared(wanted))}")
    for name, record in others:
        for key in _differences(wanted, record):
            if key not in may_differ:
                raise Refusal(f"{key} is {wanted[key]!r} in {first!r} and {record[key]!r} in {name!r}; a comparison "
                              f"needs the same, or Comparison.may_differ=[{key!r}].")


def check_losses(records: dict[str, dict]) -> None:
    """Checks that held-out losses of runs are of the same tokens.

    Raises:
        Refusal: names the entry that differs, with both values.
    """
    (first, wanted), *others = records.items()
    for name, record in others:
        for key in _differences(wanted, record):
            if key in _OF_LOSSES:
                raise Refusal(f"{key} is {wanted[key]!r} in {first} and {record[key]!r} in {name}, so their losses "
                              "are not of the same tokens and cannot be compared.")


def remarks(records: dict[str, dict]) -> list[str]:
    """Returns a sentence for each difference to the baseline that may matter, the most important first.

    The order is work, model, data, learning rate, batch, steps.

    Args:
        records: dict, name of a variant -> `continuation.record` of its run.
    """
    reference = baseline({name: config_of(record) for name, record in records.items()})
    lines = []
    for name, share in work_over_baseline(records).items():
        if abs(share) > _TOLERANCE:
            lines.append(f"{name} does {abs(share):.1%} {'more' if share > 0 else 'less'} work for a token than "
                         f"{reference}, without the router.")
    for name, record in records.items():
        if name != reference:
            lines += differences.sentences(reference, records[reference], name, record)
    return lines


def work_over_baseline(records: dict[str, dict]) -> dict[str, float]:
    """Returns the work of each variant per token divided by the baseline's, minus 1, without routers."""
    configs = {name: config_of(record) for name, record in records.items()}
    reference = baseline(configs)
    lengths = records[reference]["TASK_FEATURE_LENGTHS"]
    wanted = _without_router(work(configs[reference], lengths))
    return {name: _without_router(work(config, lengths)) / wanted - 1 for name, config in configs.items()}


def sentence_about_work(shares: dict[str, float], reference: str) -> str:
    """Returns a sentence about the work of variants, from `work_over_baseline`."""
    unequal = [f"{name} does {abs(share):.1%} {'more' if share > 0 else 'less'}" for name, share in shares.items()
               if abs(share) > _TOLERANCE]
    if not unequal:
        return f"All variants do the same work for a token, within {_TOLERANCE:.0%} and without the router."
    equal = [name for name, share in shares.items() if abs(share) <= _TOLERANCE and name != reference]
    same = f" {', '.join(equal)} and {reference} do the same within {_TOLERANCE:.0%}." if equal else ""
    return (f"Not all variants do the same work for a token: {', '.join(unequal)} than {reference}, without the "
            f"router.{same}")


def without_seed(record: dict) -> dict:
    """Returns a record without the seed and the runs of that seed it builds on: the same for all runs of a variant."""
    return {name: value for name, value in record.items()
            if name not in ("SEED", "INITIAL_CHECKPOINT", "Distillation.teacher")}


def config_of(record: dict) -> SwitchConfig:
    """Returns the SwitchConfig of a checkpoint's record."""
    return SwitchConfig(**continuation.model_fields(record))


def _compared(record):
    """Returns the names of a record that variants share."""
    kind = record["optimizer"]
    return [name for name in record if not name.startswith((*_FREE, f"{kind}.")) and name != "optimizer"]


def _differences(wanted, record):
    """Returns the shared names of two records with different values."""
    return differences.by_importance(
        name for name in _compared(wanted) if name in record and record[name] != wanted[name])
