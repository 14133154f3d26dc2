"""seqio tasks, installed as `switch_tf.tasks`.

A gin file imports one of these modules, which registers its tasks; the rest of switch_tf knows them by name only.
"""

from switch_tf import data

# Every module here imports seqio, whose metrics run on JAX.
data.keep_jax_on_cpu()
