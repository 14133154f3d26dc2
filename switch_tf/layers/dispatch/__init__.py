"""Dispatch of tokens to experts and combination of their outputs, in four forms with the same results.

* `Einsum` multiplies by one-hot masks, as GShard (arXiv 2006.16668, section 3.1). TPU partitioners turn each product
  into one all-to-all. Its cost grows with tokens times slots.
* `Index` gathers rows. Cost and memory grow with tokens.
* `Ragged` gathers rows without empty slots. It is fastest for few experts on CPU.
* `Gathered` looks up the kernels of each row, to decode a few sequences with static shapes.

`ExpertChoiceEinsum` and `ExpertChoiceIndex` are the forms for experts that choose tokens: a token may be in many slots.
"""

from switch_tf.layers.dispatch.base import Dispatcher
from switch_tf.layers.dispatch.einsum import Einsum, ExpertChoiceEinsum
from switch_tf.layers.dispatch.gathered import Gathered
from switch_tf.layers.dispatch.index import ExpertChoiceIndex, Index
from switch_tf.layers.dispatch.ragged import Ragged
from switch_tf.layers.dispatch.selection import create, fastest

__all__ = ["Dispatcher", "Einsum", "ExpertChoiceEinsum", "ExpertChoiceIndex", "Gathered", "Index", "Ragged", "create",
           "fastest"]
