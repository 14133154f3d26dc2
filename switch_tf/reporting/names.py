"""What measurements are called in metrics.jsonl and TensorBoard, and what their names say of them."""

import re

_LAYER = re.compile(r"(encoder|decoder)/[^/]*_[0-9]{1,9}(/.+)?")


def router(layer: str, name: str) -> str:
    """The name of what a sparse layer's router did."""
    return f"router/{layer}/{name}"


def sparse_layers(names) -> list[str]:
    """The layers in such names: encoder before decoder, by number; queries, keys and values, then feed-forward.

    Names of other forms, which only a damaged file has, are of no layer.
    """

    def position(layer):
        stack, number, *sublayer = layer.split("/")
        return stack == "decoder", int(number.rpartition("_")[2]), not sublayer, sublayer == ["attention", "key_value"]

    parts = [name.partition("/")[2].rpartition("/") for name in names if name.startswith("router/")]
    return sorted({layer for layer, _, name in parts if name == "expert_load" and _LAYER.fullmatch(layer)},
                  key=position)


def shares(names) -> set[str]:
    """Returns those of these names whose values are shares from 0 to 1, which people read in per cent.

    A task's own "accuracy" is its metric's, from 0 to 100 as seqio's are; the share of right tokens is then called
    "token_accuracy".
    """
    names = set(names)
    return {name for name in names if name.endswith(("token_accuracy", "_utilization", "_wait_fraction")) or (
        name.rpartition("/")[2] == "accuracy" and name.removesuffix("accuracy") + "token_accuracy" not in names)}


def shown(value: float, is_share: bool) -> str:
    """Returns a value of a metric for people: four digits, or a share in per cent."""
    return f"{value:.1%}" if is_share else f"{value:.4f}"
