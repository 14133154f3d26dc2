"""Makes tests/golden/parameters.json: every parameter of five small models, with shape, dtype and logical axes.

Run from the repository root with the environment of the tests: `.venv/bin/python tests/golden/parameters.py`. PyTorch
is not needed. Checkpoints are stored by these paths and laid out by these axes: a line that changes is a checkpoint
that no longer loads.
"""

import json
import pathlib

import switch_tf

FILE = pathlib.Path(__file__).with_suffix(".json")
SMALL = {"vocab_size": 64, "d_model": 16, "d_ff": 24, "d_kv": 4, "num_heads": 3}


def configs() -> dict[str, switch_tf.SwitchConfig]:
    """The models by name."""
    return {
        "switch_tiny": switch_tf.SwitchConfig.from_preset("switch_tiny"),
        "t5_tiny": switch_tf.SwitchConfig.from_preset("t5_tiny"),
        "geglu_untied": switch_tf.SwitchConfig(
            **SMALL, num_encoder_layers=2, num_decoder_layers=3, activation="geglu", logits_via_embedding=False,
            num_experts=4, decoder_sparse_step=3),
        "encoder_only": switch_tf.SwitchConfig(
            **SMALL, num_encoder_layers=2, num_decoder_layers=0, num_experts=4, encoder_sparse_step=1),
        "attention_experts": switch_tf.SwitchConfig(
            **SMALL, num_encoder_layers=1, num_decoder_layers=2, num_experts=4, encoder_sparse_step=1,
            expert_sublayers="feed_forward_and_attention", extra_mlp=True),
    }


def describe(config: switch_tf.SwitchConfig, dtype: str = "float32") -> list[dict]:
    """Path, shape, dtype and logical axes of every parameter, in the model's order."""
    model = switch_tf.SwitchTransformer(config, dtype=dtype)
    model.build()
    return [{"path": variable.path, "shape": list(variable.shape), "dtype": variable.dtype,
             "axes": list(variable.logical_axes)} for variable in model.variables]


def main() -> None:
    """Writes the file, one parameter a line."""
    models = []
    for name, config in configs().items():
        lines = ",\n".join("    " + json.dumps(parameter) for parameter in describe(config))
        models.append(f'  "{name}": [\n{lines}\n  ]')
    FILE.write_text("{\n" + ",\n".join(models) + "\n}\n")


if __name__ == "__main__":
    main()
