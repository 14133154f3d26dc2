"""Which experts the tokens of one text, and of its answer, go to."""

import numpy as np

from switch_tf import context, data
from switch_tf.inference.text_model import TextModel
from switch_tf.layers import routes
from switch_tf.ops import forms


class TokenRoutes:
    """Looks into the layers of experts of a model while it reads a text and its answer.

    Args:
        text_model: TextModel.
    """

    def __init__(self, text_model: TextModel):
        self._text_model = text_model
        self._gates = forms.compiled(self._run, ranks=(2, 2))

    def of(self, inputs: list[int], outputs: list[int]) -> dict:
        """Where tokens go, as they did while the answer was decoded.

        Args:
            inputs: ids, of `TextModel.read`.
            outputs: ids, of `Answer`.

        Returns:
            dict, JSON-able: `inputs` and `outputs`, lists of pieces of text, the latter those that the decoder reads:
            the start of sequence and all but the last of `outputs`; `num_experts`; and `layers`, in order, dicts of
            `layer`, its path, of `reads`, "inputs" or "outputs", and of `experts`, for each token a list of
            `[expert, gate]`, the largest gate first, empty where no expert took it.
        """
        features = self._text_model.features
        read = [0, *outputs[:-1]]
        found = self._gates(np.asarray([inputs], "int32"), np.asarray([read], "int32"))
        layers = []
        for name, gates in found.items():
            path = name.partition("/")[2]
            layers.append({"layer": path, "reads": "outputs" if path.startswith("decoder/") else "inputs",
                           "experts": [_experts(own) for own in np.asarray(gates)[0]]})
        return {"inputs": data.pieces(features.inputs, inputs), "outputs": data.pieces(features.targets, read),
                "num_experts": self._text_model.model.config.num_experts, "layers": layers}

    def _run(self, inputs, outputs):
        with context.within(no_drop=True), routes.recorded() as found:
            self._text_model.model.forward({"encoder_input_tokens": inputs, "decoder_input_tokens": outputs})
        return {route.layer: route.gates for route in found}


def _experts(gates):
    """<float32>[expert] -> list of [expert, gate]."""
    chosen = np.flatnonzero(gates)
    return [[int(expert), round(float(gates[expert]), 4)] for expert in chosen[np.argsort(-gates[chosen])]]
