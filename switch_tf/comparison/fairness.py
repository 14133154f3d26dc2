"""Checks that runs have the same data, rules and work per token. Needs no TensorFlow."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from switch_tf.configs.choices import nearest
from switch_tf.configs.switch_config import SwitchConfig
from switch_tf.refusals import Refusal

_TOLERANCE = 0.02
# Entries of `continuation.record` that may differ between variants.
_FREE = ("SwitchConfig.", "SwitchTransformer.", "SEED")
# Must agree for losses to be comparable.
_OF_LOSSES = ("MIXTURE_OR_TASK_NAME", "TASK_FEATURE_LENGTHS", "Run.eval_batches", "held-out data", "vocabulary")
# The likeliest reasons for a difference between losses first.
_ORDER = ("SwitchConfig.", "SwitchTransformer.", "INITIAL_CHECKPOINT", "MIXTURE_OR_TASK_NAME", "training data",
          "held-out data", "vocabulary", "TASK_FEATURE_LENGTHS", "Run.pack", "Run.cache_parts", "optimizer",
          "learning rate", "BATCH_SIZE", "TRAIN_STEPS", "StepSettings.", "Run.eval_batches", "Run.", "EVAL_PERIOD")
# Without effect on the model and its held-out losses.
_WITHOUT_EFFECT = frozenset((
    "SEED", "LOG_PERIOD", "CHECKPOINT_PERIOD", "Run.keep_checkpoints", "Run.keep_every", "Run.unigram_batches",
    "Run.shown_examples", "Run.best_metric", "Run.eval_each_task", "StepSettings.steps_per_call",
    "SwitchConfig.end_id", "SwitchConfig.num_experts"))  # has a column in the table
# Fields without effect if there are no experts: those below `num_experts`, but for one.
_FIELDS = [f"SwitchConfig.{field.name}" for field in dataclasses.fields(SwitchConfig)]
_OF_EXPERTS = {*_FIELDS[_FIELDS.index("SwitchConfig.num_experts") + 1:]} - {"SwitchConfig.extra_mlp"}


def work(config: SwitchConfig, task_feature_lengths: dict) -> dict[str, float]:
    """Returns the work of a forward pass, averaged over a sequence of "inputs" and "targets".

    `flops_per_token` are FLOPs of products with weights, router included, see `SwitchConfig.flops_per_sequence`. The
    shares are relative to them. `capacity_padding_share` is additional.
    """
    inputs = task_feature_lengths["inputs"]
    targets = 0 if config.is_encoder_only else task_feature_lengths["targets"]
    flops, parts = config.flops_per_sequence(inputs, targets), config.flops_by_part(inputs, targets)
    return {"flops_per_token": flops / (inputs + targets), "router_flops_share": parts["router"] / flops,
            "capacity_padding_share": parts["capacity_padding"] / flops}


def work_without_router(configs: dict[str, Any], task_feature_lengths: dict) -> tuple[str, dict, dict]:
    """Returns the baseline's name, FLOPs per token without the router, and their excess as a share."""
    flops = {}
    for name, config in configs.items():
        cost = work(config, task_feature_lengths)
        flops[name] = cost["flops_per_token"] * (1 - cost["router_flops_share"])
    reference = next((name for name, config in configs.items() if not config.num_experts), next(iter(configs)))
    return reference, flops, {name: value / flops[reference] - 1 for name, value in flops.items()}


def check_work(configs: dict[str, Any], task_feature_lengths: dict, unequal_work: Sequence[str] = ()) -> None:
    """Refuses a variant with over 2 % more or less work per token than the baseline, without the router.

    Variants in `unequal_work` may differ.
    """
    reference, flops, shares = work_without_router(configs, task_feature_lengths)
    for name, share in shares.items():
        if abs(share) > _TOLERANCE and name not in unequal_work:
            raise Refusal(f"{name!r} does {flops[name]:,.0f} FLOPs a token without its router and {reference!r} does "
                          f"{flops[reference]:,.0f}, {share:+.1%}; they may differ by {_TOLERANCE:.0%}. Match "
                          f"them by d_ff, or allow it with Comparison.unequal_work=[{name!r}].")


def check_records(records: dict[str, dict], may_differ: Sequence[str] = ()) -> None:
    """Refuses the first difference between variants, except in model, optimizer and seed.

    Args:
        records: Variant -> `continuation.record` of its run.
        may_differ: Names in a record.
    """
    compared = _compared(records)
    names = next(iter(compared.values()))
    for key in may_differ:
        if key not in names:
            raise Refusal(f"Comparison.may_differ names {key!r}; what may differ are {', '.join(names)}."
                          f"{nearest(key, names)}")
    for key, first, value, name, other in _differences(compared):
        if key not in may_differ:
            raise Refusal(f"{key} is {value!r} in {first!r} and {other!r} in {name!r}; a comparison needs the same, or "
                          f"Comparison.may_differ=[{key!r}].")


def check_losses(records: dict[str, dict]) -> None:
    """Refuses held-out losses over different tokens."""
    for key, first, value, name, other in _differences(_compared(records)):
        if key in _OF_LOSSES:
            raise Refusal(f"{key} is {value!r} in {first} and {other!r} in {name}, so their losses are not of the same "
                          "tokens and cannot be compared.")


def _compared(records):
    return {name: {key: value for key, value in record.items() if key != "optimizer"
                   and not key.startswith((*_FREE, f"{record['optimizer']}."))} for name, record in records.items()}


def _differences(records):
    """Yields (key, first run, its value, other run, its value), ordered by _ORDER."""
    (first, wanted), *variants = records.items()
    keys = sorted(wanted, key=lambda key: next(
        (place for place, start in enumerate(_ORDER) if key.startswith(start)), len(_ORDER)))
    for name, record in variants:
        for key in keys:
            if key in record and record[key] != wanted[key]:
                yield key, first, wanted[key], name, record[key]


def remarks(records: dict[str, dict], shares: dict[str, float], reference: str) -> list[str]:
    """Returns sentences about differences to the baseline that may matter, work first, then ordered by _ORDER.

    `shares` come from `work_without_router`, `reference` is the baseline's name.
    """
    lines = [f"{name} does {_amount(share)} work for a token than {reference}, without the router."
             for name, share in shares.items() if abs(share) > _TOLERANCE]
    # The learning rates of all optimizers get one name.
    with_effect = {name: {
        key.replace(f"{record['optimizer']}.learning_rate", "learning rate"): value for key, value in record.items()
        if key not in _WITHOUT_EFFECT and (record.get("SwitchConfig.num_experts") or key not in _OF_EXPERTS)}
        for name, record in records.items()}
    for key, first, value, name, other in _differences({reference: with_effect[reference], **with_effect}):
        if isinstance(value, dict) and key != "TASK_FEATURE_LENGTHS":
            file, *more = [file for file in sorted({*value, *other}) if value.get(file) != other.get(file)]
            lines.append(f"{key} differ between {first} and {name}: {file}"
                         + (f" and {len(more)} more." if more else "."))
        else:
            lines.append(f"{key} is {value} in {first} and {other} in {name}.")
    return lines


def _amount(share):
    return f"{abs(share):.1%} {'more' if share > 0 else 'less'}"


def sentence_about_work(shares: dict[str, float], reference: str) -> str:
    """Returns a sentence about variants' work, from `work_without_router`."""
    unequal = [f"{name} does {_amount(share)}" for name, share in shares.items() if abs(share) > _TOLERANCE]
    if not unequal:
        return f"All variants do the same work for a token, within {_TOLERANCE:.0%} and without the router."
    equal = [name for name, share in shares.items() if abs(share) <= _TOLERANCE and name != reference]
    same = f" {', '.join(equal)} and {reference} do the same within {_TOLERANCE:.0%}." if equal else ""
    return (f"Not all variants do the same work for a token: {', '.join(unequal)} than {reference}, without the "
            f"router.{same}")
