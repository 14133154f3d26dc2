"""Tied logits are those of T5: hidden states times d_model^-0.5, which bfloat16 cannot hold."""

import numpy as np
import tensorflow as tf

from switch_tf import SwitchConfig, SwitchTransformer


def test_under_bfloat16_the_scale_of_tied_logits_is_not_rounded():
    # 768^-0.5 is 0.036084; the nearest bfloat16, 0.036133, would make every logit 0.13 % too large.
    config = SwitchConfig(vocab_size=8, d_model=768, d_ff=8, num_heads=1, num_encoder_layers=1, num_decoder_layers=0)
    model = SwitchTransformer(config, dtype="mixed_bfloat16")
    model.build()
    rng = np.random.RandomState(0)
    hidden, table = (tf.cast(np.abs(rng.randn(*shape)), tf.bfloat16) for shape in ((2, 3, 768), (8, 768)))
    model.token_embedder.embedding.assign(tf.cast(table, tf.float32))
    exact = np.einsum("blm,vm->blv", *(tf.cast(x, tf.float64).numpy() for x in (hidden, table))) * 768**-0.5
    ratio = model._logits(hidden).numpy() / exact
    # The remaining error is the rounding of 768 scaled hidden states, at most 2^-9 each, which averages out.
    np.testing.assert_allclose(ratio, 1.0, atol=3e-4)
