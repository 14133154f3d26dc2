"""Names of measurements in metrics.jsonl and TensorBoard."""

import re
from collections.abc import Iterable

_LAYER = re.compile(r"(encoder|decoder)/[^/]*_[0-9]{1,9}(/.+)?")


def router(layer: str, name: str) -> str:
    """Returns the logged name of a statistic of a sparse layer's router."""
    return f"router/{layer}/{name}"


def sparse_layers(names: Iterable[str]) -> list[str]:
    """Returns the layers in logged names, in the order of the model.

    Encoder before decoder, then by number, then queries, keys and values, feed-forward. Ignores names of another form,
    which occur in damaged files.
    """

    def position(layer):
        stack, number, *sublayer = layer.split("/")
        return stack == "decoder", int(number.rpartition("_")[2]), not sublayer, sublayer == ["attention", "key_value"]

    parts = [name.partition("/")[2].rpartition("/") for name in names if name.startswith("router/")]
    return sorted({layer for layer, _, name in parts if name == "expert_load" and _LAYER.fullmatch(layer)},
                  key=position)


def shares(names: Iterable[str]) -> set[str]:
    """Returns the names with values from 0 to 1, which are shown in per cent.

    An "accuracy" beside a "token_accuracy" is a task's own metric, from 0 to 100 like seqio's.
    """
    names = set(names)
    return {name for name in names if name.endswith(("token_accuracy", "_utilization", "_wait_fraction")) or (
        name.rpartition("/")[2] == "accuracy" and name.removesuffix("accuracy") + "token_accuracy" not in names)}


def shown(value: float, is_share: bool) -> str:
    """Returns the text of a value: four digits, or per cent for a share."""
    return f"{value:.1%}" if is_share else f"{value:.4f}"
