"""Where in the model an operation of the program comes from, by the name that TensorFlow gave it."""

import re


def layer(operation: str) -> str:
    """The layer in the name of an operation: "../ent_tape/../encoder_1/layers_1_1/mlp_1/XlaSharding" gives "gradient of
    encoder/layers_1/mlp".
    """
    parts = [part for part in operation.split("/") if part]
    stack = next((place for place, part in enumerate(parts)
                  if re.fullmatch(r"(encoder|decoder|token_embedder|logits_dense)(_\d+)?", part)), None)
    if stack is None:
        return "losses and update"
    # TensorFlow numbers names that it has seen before: layers_1_1, mlp_1.
    scopes = [re.sub(r"^(layers_\d+|.*?)(_\d+)?$", r"\1", part) for part in parts[stack:-1]
              if not re.match(r"jit\(|einsum", part)]
    is_gradient = any("gradient_tape" in part or "ent_tape" in part for part in parts)
    return ("gradient of " if is_gradient else "") + "/".join(scopes)
