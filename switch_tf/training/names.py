"""What measurements are called in metrics.jsonl and TensorBoard, and what their names say of them."""


def router(layer: str, name: str) -> str:
    """The name of what a sparse layer's router did."""
    return f"router/{layer}/{name}"


def sparse_layers(names) -> list[str]:
    """The layers in such names: encoder before decoder, by number; queries, keys and values, then feed-forward."""

    def position(layer):
        stack, number, *sublayer = layer.split("/")
        return stack == "decoder", int(number.rpartition("_")[2]), not sublayer, sublayer == ["attention", "key_value"]

    parts = [name.partition("/")[2].rpartition("/") for name in names if name.startswith("router/")]
    return sorted({layer for layer, _, name in parts if name == "expert_load"}, key=position)
