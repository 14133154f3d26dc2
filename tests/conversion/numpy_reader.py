"""A reader of Hugging Face folders that shares no code with the package: safetensors, config.json and NumPy.

The formulas are those of transformers' `modeling_t5.py`, `modeling_umt5.py` and `modeling_switch_transformers.py`, in
float64. Supported is what the journeys write: relu and the tanh form of gated GELU, T5, UMT5 and Switch Transformers.
"""

import json
import pathlib

import numpy as np
import safetensors.numpy


def read(folder: pathlib.Path) -> tuple[dict, dict[str, np.ndarray]]:
    """Returns config.json and name -> tensor, in the dtype of the file."""
    return (json.loads((folder / "config.json").read_text()),
            safetensors.numpy.load_file(folder / "model.safetensors"))


def logits_of(folder: pathlib.Path, inputs: np.ndarray, decoder_inputs: np.ndarray) -> np.ndarray:
    """Returns logits, <float64>[batch, length, vocab_size], of <int>[batch, length] inputs. Id 0 is padding."""
    config, tensors = read(folder)
    return _Model(config, {name: values.astype(np.float64) for name, values in tensors.items()})(inputs, decoder_inputs)


def softmax(scores):
    exponentials = np.exp(scores - scores.max(-1, keepdims=True))
    return exponentials / exponentials.sum(-1, keepdims=True)


def _gelu_tanh(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


class _Model:

    def __init__(self, config, tensors):
        self.config, self.tensors = config, tensors

    def __call__(self, inputs, decoder_inputs):
        hidden = self._stack("encoder", inputs, inputs != 0, None)
        hidden = self._stack("decoder", decoder_inputs, np.ones(decoder_inputs.shape, bool), (hidden, inputs != 0))
        # transformers 5 scales a UMT5 always, a T5 if its configuration asks for it, and others if the table is shared.
        is_scaled = self.config["model_type"] == "umt5" or self.config.get(
            "scale_decoder_outputs", self.config["tie_word_embeddings"])
        table = self.tensors.get("lm_head.weight", self.tensors["shared.weight"])
        return hidden * (self.config["d_model"]**-0.5 if is_scaled else 1) @ table.T

    def _stack(self, stack, tokens, is_key, encoded):
        hidden, biases = self.tensors["shared.weight"][tokens], None
        mask = is_key[:, None, None, :]
        if encoded is not None:
            mask = mask & np.tri(tokens.shape[1], dtype=bool)
        for index in range(self.config["num_decoder_layers" if encoded is not None else "num_layers"]):
            layer = f"{stack}.block.{index}.layer"
            name = f"{layer}.0.SelfAttention.relative_attention_bias.weight"
            if name in self.tensors:  # of the first layer alone, or of each in a UMT5
                biases = self._biases(self.tensors[name], tokens.shape[1], encoded is None)
            normed = self._norm(hidden, f"{layer}.0.layer_norm.weight")
            hidden = hidden + self._attention(f"{layer}.0.SelfAttention", normed, normed, mask, biases)
            last = 1
            if encoded is not None:
                normed = self._norm(hidden, f"{layer}.1.layer_norm.weight")
                hidden = hidden + self._attention(f"{layer}.1.EncDecAttention", normed, encoded[0],
                                                  encoded[1][:, None, None, :], 0)
                last = 2
            normed = self._norm(hidden, f"{layer}.{last}.layer_norm.weight")
            hidden = hidden + self._feed_forward(f"{layer}.{last}", normed)
        return self._norm(hidden, f"{stack}.final_layer_norm.weight")

    def _norm(self, hidden, name):
        variance = np.mean(hidden**2, -1, keepdims=True)
        return self.tensors[name] * hidden / np.sqrt(variance + self.config["layer_norm_epsilon"])

    def _attention(self, name, queries, keys, mask, biases):
        heads = self.config["num_heads"]

        def project(hidden, kind):
            projected = hidden @ self.tensors[f"{name}.{kind}.weight"].T
            return projected.reshape(*hidden.shape[:2], heads, -1).transpose(0, 2, 1, 3)

        scores = project(queries, "q") @ project(keys, "k").swapaxes(-1, -2) + biases
        mixed = softmax(np.where(mask, scores, -1e30)) @ project(keys, "v")
        return mixed.transpose(0, 2, 1, 3).reshape(*queries.shape[:2], -1) @ self.tensors[f"{name}.o.weight"].T

    def _biases(self, table, length, is_bidirectional):
        count, furthest = table.shape[0], self.config["relative_attention_max_distance"]
        distance = np.arange(length) - np.arange(length)[:, None]  # key minus query
        buckets = np.zeros_like(distance)
        if is_bidirectional:
            count //= 2
            buckets, distance = count * (distance > 0), np.abs(distance)
        else:
            distance = np.maximum(-distance, 0)
        exact = count // 2
        far = exact + (np.log(np.maximum(distance, 1) / exact) / np.log(furthest / exact) * (count - exact)).astype(int)
        return table[buckets + np.where(distance < exact, distance, np.minimum(far, count - 1))].transpose(2, 0, 1)

    def _feed_forward(self, layer, hidden):
        if f"{layer}.mlp.router.classifier.weight" in self.tensors:
            return self._experts(f"{layer}.mlp", hidden)
        is_t5 = f"{layer}.DenseReluDense.wo.weight" in self.tensors
        return self._dense(f"{layer}.{'DenseReluDense' if is_t5 else 'mlp'}", hidden)

    def _dense(self, name, hidden):
        if f"{name}.wi_0.weight" in self.tensors:
            inner = _gelu_tanh(hidden @ self.tensors[f"{name}.wi_0.weight"].T) * (
                hidden @ self.tensors[f"{name}.wi_1.weight"].T)
        else:
            inner = np.maximum(hidden @ self.tensors[f"{name}.wi.weight"].T, 0)
        return inner @ self.tensors[f"{name}.wo.weight"].T

    def _experts(self, name, hidden):
        """The first `expert_capacity` tokens of a sequence that choose an expert; nothing is added for the others."""
        probabilities = softmax(hidden @ self.tensors[f"{name}.router.classifier.weight"].T)
        chosen = probabilities.argmax(-1)
        outputs = np.zeros_like(hidden)
        for expert in range(self.config["num_experts"]):
            wants = chosen == expert
            is_kept = wants & (wants.cumsum(-1) <= self.config["expert_capacity"])
            outputs[is_kept] = self._dense(f"{name}.experts.expert_{expert}", hidden[is_kept])
        return outputs * probabilities.max(-1, keepdims=True)
