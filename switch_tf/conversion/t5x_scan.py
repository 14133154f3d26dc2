"""Scanned layers of a T5X checkpoint, seen as single layers.

A scanned stack holds the kernels of its n layers in one array, "encoder/encoder/mlp/wi/kernel" of shape [d, n, f], with
the layers on axis 1. If dense and sparse layers take turns, n blocks are scanned, and "subblock_0", "subblock_1", ...
are the layers of a block. Here each becomes the n arrays "encoder/layers_<i>/mlp/wi/kernel" of shape [d, f].
"""

import re
from collections.abc import Mapping

import numpy as np

from switch_tf.configs.switch_config import SwitchConfig
from switch_tf.conversion.checkpoint_files import Tensor
from switch_tf.conversion.last_read import LastRead
from switch_tf.refusals import Refusal

_SCANNED = re.compile(r"target/(encoder|decoder)/\1/(?:subblock_(0|[1-9]\d{0,3})/)?(.+)")
_AXIS = 1
KEPT_SIZE = 2**28  # elements, 1 GiB in float32


def is_scanned(name: str) -> bool:
    """Returns whether an array holds scanned layers."""
    return _SCANNED.fullmatch(name) is not None


def unscan(tensors: Mapping[str, Tensor], config: SwitchConfig) -> dict[str, Tensor]:
    """Returns the tensors of a checkpoint with those of scanned layers cut into single layers, one after the other.

    A scanned tensor is read when its first layer is, and kept until another one is read. One of more than KEPT_SIZE
    elements is not kept, and each of its layers is read by itself.

    Raises:
        Refusal: a tensor does not have the scanned layers of the configuration on axis 1.
    """
    matches = {name: _SCANNED.fullmatch(name) for name in tensors}
    block_sizes = {stack: _block_size(stack, {match[2] for match in matches.values() if match and match[1] == stack})
                   for stack in ("encoder", "decoder")}
    last = LastRead()
    result: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        layers = {name: tensor}
        if match := matches[name]:
            stack, place, rest = match[1], int(match[2] or 0), match[3]
            num_blocks = _num_blocks(name, tensor, stack, block_sizes[stack], config)
            layers = {f"target/{stack}/layers_{block * block_sizes[stack] + place}/{rest}": _layer(
                last, name, tensor, block) for block in range(num_blocks)}
        if twice := sorted(layers.keys() & result.keys()):
            raise Refusal(f"The checkpoint holds {twice[0]!r} twice, by itself and among scanned layers.")
        result |= layers
    return result


def _layer(last, name, tensor, block):
    """Returns one layer of a scanned tensor. A large one is read layer by layer."""
    def load_part(index):
        rows, *others = index or (slice(None),)
        return tensor.load_part((rows, block, *others))

    if tensor.size > KEPT_SIZE and tensor.load_part is not None:
        return Tensor(_without_axis(tensor.shape), lambda: load_part(()), load_part)
    return Tensor(_without_axis(tensor.shape), lambda: np.take(last.get(name, tensor.load), block, _AXIS))


def _block_size(stack, places):
    """Returns the number of layers in a block, given the numbers of its subblocks, {None} if there are none."""
    size = len(places)
    if places not in (set(), {None}, {str(place) for place in range(size)}):
        names = sorted(f"subblock_{place}" if place else f"{stack} itself" for place in places)
        raise Refusal(f"The checkpoint's scanned {stack} must hold subblock_0, subblock_1 and so on, and holds "
                      f"{', '.join(names[:8])}; it is incomplete or damaged.")
    return size


def _num_blocks(name, tensor, stack, block_size, config):
    num_layers = getattr(config, f"num_{stack}_layers")
    num_blocks, rest = divmod(num_layers, block_size)
    if rest or len(tensor.shape) <= _AXIS or tensor.shape[_AXIS] != num_blocks:
        kind = "layers" if block_size == 1 else f"blocks of {block_size}"
        wanted = f"does not consist of {kind}" if rest else f"has {num_blocks} {kind} on axis {_AXIS}"
        raise Refusal(f"The checkpoint's scanned {name!r} has shape {tensor.shape}, but the configuration's {stack} of "
                      f"{num_layers} layers {wanted}; it is of another model, or was scanned along another axis.")
    return num_blocks


def _without_axis(shape):
    return shape[:_AXIS] + shape[_AXIS + 1:]
