"""One embedding under any of the names that transformers ties, and logits of their own beside it.

transformers stores a tied weight under one of its names, and which one has changed: `shared`, a stack's `embed_tokens`,
or `lm_head`. PyTorch's own files list all of them. Names whose tensors are equal are one weight.
"""

import numpy as np

from switch_tf.refusals import Refusal

EMBEDDING, LOGITS = "shared.weight", "lm_head.weight"
STACK_EMBEDDINGS = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")


def unify(tensors: dict, ties_logits: bool) -> None:
    """Leaves the embedding under EMBEDDING and, where the logits have weights of their own, those under LOGITS.

    A file in which no name of the embedding is left as it is: the rules name what is missing.

    Args:
        tensors: name -> Tensor, changed in place.
        ties_logits: bool. Whether transformers uses `lm_head` as the embedding if it has no other name.

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
                "switch_tf, as they do in T5, so a model with two cannot be read. If they should be equal, one of them "
                "is damaged or was left out of fine-tuning: remove the wrong one from the file.")
        del tensors[name]
    tensors[EMBEDDING] = tensors.pop(names[0])
    if LOGITS in tensors and _are_equal(embedding, tensors[LOGITS]):
        del tensors[LOGITS]


def _are_equal(one, other) -> bool:
    return one.shape == other.shape and np.array_equal(one.read(), other.read())


def copies(config) -> tuple[str, ...]:
    """Further names under which transformers wants the embedding of a model with this SwitchConfig.

    Its Switch Transformer ties nothing where tie_word_embeddings is false, which is how it says that the last hidden
    state is not scaled.
    """
    if config.scales_logits:
        return ()
    stacks = STACK_EMBEDDINGS[:1 if config.is_encoder_only else 2] if config.num_experts else ()
    has_tied_logits = config.logits_via_embedding and not config.is_encoder_only
    return (LOGITS, *stacks) if has_tied_logits else stacks
