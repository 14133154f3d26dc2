"""Finds the embedding under any name that transformers ties, and separate logits.

Versions of transformers store a tied weight under different names: `shared`, `embed_tokens` of a stack, or `lm_head`.
Files of PyTorch have all of them. Names with equal tensors are one weight.
"""

import numpy as np

from switch_tf.configs.switch_config import SwitchConfig
from switch_tf.refusals import Refusal

EMBEDDING, LOGITS = "shared.weight", "lm_head.weight"
STACK_EMBEDDINGS = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")


def unify(tensors: dict, ties_logits: bool) -> None:
    """Renames the embedding to EMBEDDING and removes its copies. Separate logits stay under LOGITS.

    Tensors without any embedding are not changed. The rules name it as missing later.

    Args:
        tensors: Name -> Tensor, changed in place.
        ties_logits: bool. Whether transformers uses `lm_head` as the embedding if no other name stores one.

    Raises:
        Refusal: two names of the embedding hold different tensors.
    """
    names = [name for name in (EMBEDDING, *STACK_EMBEDDINGS) if name in tensors]
    if not names and LOGITS in tensors and ties_logits:
        names = [LOGITS]
    if not names:
        return
    embedding = tensors[names[0]]
    for name in names[1:]:
        if not _are_equal(embedding, tensors[name]):
            raise Refusal(
                f"The checkpoint's {name!r} and {names[0]!r} differ, but encoder and decoder share one embedding in "
                "switch_tf, as they do in T5, so a model with two cannot be read; if they should be equal, one of "
                "them is damaged or was left out of fine-tuning: remove the wrong one from the file.")
        del tensors[name]
    tensors[EMBEDDING] = tensors.pop(names[0])
    if LOGITS in tensors and _are_equal(embedding, tensors[LOGITS]):
        del tensors[LOGITS]


def _are_equal(first, second) -> bool:
    return first.shape == second.shape and np.array_equal(first.read(), second.read())


def copies(config: SwitchConfig) -> tuple[str, ...]:
    """Returns the other names under which transformers reads the embedding of a model with this SwitchConfig.

    Copies are needed by its Switch Transformer, which ties nothing if tie_word_embeddings is false. That flag also
    means that the last hidden state is not scaled.
    """
    if config.scales_logits:
        return ()
    stacks = STACK_EMBEDDINGS[:1 if config.is_encoder_only else 2] if config.num_experts else ()
    has_tied_logits = config.logits_via_embedding and not config.is_encoder_only
    return (LOGITS, *stacks) if has_tied_logits else stacks
