"""Selects the weights that a run trains. The others get no gradient and no optimizer slots."""

import keras

from switch_tf.configs.choices import TRAINABLE, check_choice
from switch_tf.configs.switch_config import SwitchConfig
from switch_tf.refusals import Refusal

# Choice -> whether a path within the model belongs to a weight that is trained.
_PARTS = {
    "experts": lambda path: "/experts/" in path,
    "all_but_experts": lambda path: "/experts/" not in path,
    "router": lambda path: "/router/" in path,
    "decoder": lambda path: path.startswith(("decoder/", "logits_dense/")),
}


def check(trainable: str, config: SwitchConfig) -> None:
    """Raises Refusal for a choice that leaves nothing to train.

    Args:
        trainable: str, see `select`.
        config: SwitchConfig.
    """
    check_choice("TRAINABLE", trainable, TRAINABLE)
    is_missing = (trainable == "decoder" and config.is_encoder_only) or (
        trainable in ("experts", "router") and not config.sparse_layer_names) or (
        trainable == "router" and config.routing_policy == config.decoder_policy == "hash")
    if is_missing:
        raise Refusal(f"TRAINABLE is {trainable!r}, but this model has no such weights, so nothing would train; use "
                      "'all'.")


def select(model: keras.Model, trainable: str) -> None:
    """Freezes the weights that a run does not train. Called before the optimizer is built.

    Args:
        model: SwitchTransformer, built.
        trainable: "all", "all_but_experts", "experts", "router" or "decoder". The decoder includes logits of its own,
            but not a shared embedding, which the encoder also reads.
    """
    for variable in model.trainable_variables if trainable != "all" else ():
        variable.trainable = _PARTS[trainable](variable.path.partition("/")[2])
