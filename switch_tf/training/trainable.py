"""Which weights a run trains; the others get no gradient and no optimizer slots."""

from switch_tf.configs.choices import TRAINABLE, check_choice
from switch_tf.refusals import Refusal

# What the paths of a part's weights hold, within the model.
_PARTS = {
    "experts": lambda path: "/experts/" in path,
    "all_but_experts": lambda path: "/experts/" not in path,
    "router": lambda path: "/router/" in path,
    "decoder": lambda path: path.startswith(("decoder/", "logits_dense/")),
}


def check(trainable: str, config) -> None:
    """Refuses a choice that leaves nothing to train.

    Raises:
        Refusal: the model has no such part.
    """
    check_choice("TRAINABLE", trainable, TRAINABLE)
    is_missing = (trainable == "decoder" and config.is_encoder_only) or (
        trainable in ("experts", "router") and not config.sparse_layer_names) or (
        trainable == "router" and config.routing_policy == config.decoder_policy == "hash")
    if is_missing:
        raise Refusal(f"TRAINABLE is {trainable!r}, but this model has no such weights, so nothing would train; use "
                      "'all'.")


def select(model, trainable: str) -> None:
    """Freezes the weights of a built model that a run does not train, before the optimizer is built.

    Args:
        model: SwitchTransformer, built.
        trainable: "all", "all_but_experts", "experts", "router", or "decoder" with logits of its own; the table of a
            shared embedding is the encoder's, too.
    """
    for variable in model.variables if trainable != "all" else ():
        variable.trainable = _PARTS[trainable](variable.path.partition("/")[2])
