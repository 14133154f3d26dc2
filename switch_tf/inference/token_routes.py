"""Experts of the tokens of a text and of its answer."""

import numpy as np

from switch_tf import context, data
from switch_tf.inference.text_model import TextModel


class TokenRoutes:
    """Records the routes of a model while it reads a text and its answer.

    Args:
        text_model: TextModel.
    """

    def __init__(self, text_model: TextModel):
        self._text_model = text_model
        self._gates = text_model.compiled(self._run, ranks=(2, 2))

    def of(self, inputs: list[int], outputs: list[int]) -> dict:
        """Returns the experts of each token, the same as while the answer was decoded.

        Args:
            inputs: list of int, `ids` of `TextModel.read`.
            outputs: list of int, `ids` of an `Answer`.

        Returns:
            dict, JSON-able.
            `inputs`: list of pieces of text.
            `outputs`: list of pieces that the decoder reads: the start of sequence and `outputs` without the last one.
            `num_experts`: int.
            `layers`: list of dict, in order. `layer`: path. `reads`: "inputs" or "outputs". `experts`: for each token a
            list of `[expert, gate]`, the largest gate first, empty for a token without an expert.
        """
        model, features = self._text_model, self._text_model.features
        read = [0, *outputs[:-1]]
        gates_of_layers = self._gates(model.alone(inputs, model.inputs_length), model.alone(read, model.max_length))
        layers = []
        for name, gates in gates_of_layers.items():
            path = name.partition("/")[2]
            reads, ids = ("outputs", read) if path.startswith("decoder/") else ("inputs", inputs)
            layers.append({"layer": path, "reads": reads,
                           "experts": [_experts(token) for token in np.asarray(gates)[0, :len(ids)]]})
        return {"inputs": data.pieces(features.inputs, inputs), "outputs": data.pieces(features.targets, read),
                "num_experts": model.model.config.num_experts, "layers": layers}

    def _run(self, inputs, outputs):
        routes = []
        with context.within(no_drop=True, routes=routes):
            self._text_model.model.forward({"encoder_input_tokens": inputs, "decoder_input_tokens": outputs})
        return {route.layer: route.gates for route in routes}


def _experts(gates):
    """Returns the gates of a token, <float32>[expert], as a list of [expert, gate]."""
    chosen = np.flatnonzero(gates)
    return [[int(expert), round(float(gates[expert]), 4)] for expert in chosen[np.argsort(-gates[chosen])]]
