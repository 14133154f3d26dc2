"""switch_tf's greedy decoding: `model.generate`, or the program for batches of any size that is exported."""

import keras
import tensorflow as tf
from step_problem import CROSS_ATTENTION_FACTOR, EMBEDDING_FACTOR, batch, tokens_of_a_step

from switch_tf import SwitchConfig, SwitchTransformer, decoding


def decode(job):
    """Decodes `max_length` tokens of each of `batch` inputs; none of them is an end."""
    keras.utils.set_random_seed(0)
    config = SwitchConfig(
        vocab_size=job["vocab_size"], d_model=job["d_model"], d_ff=job["d_ff"], d_kv=job["d_kv"],
        num_heads=job["heads"], num_encoder_layers=job["layers"], num_decoder_layers=job["layers"], dropout_rate=0.0,
        num_experts=job["experts"])
    model = SwitchTransformer(config)
    model.build()
    for factor, weight in ((EMBEDDING_FACTOR, model.token_embedder.embedding), *(
            (CROSS_ATTENTION_FACTOR, layer.cross_attention.out) for layer in model.decoder.layers)):
        weight.assign(weight * factor)
    sources, _ = batch(job)
    length, no_end = job["max_length"], job["vocab_size"]
    of_any_size = tf.function(
        lambda inputs: decoding.Greedy().decode(model, {"encoder_input_tokens": inputs}, length, no_end),
        input_signature=[tf.TensorSpec([None, None], tf.int32)], autograph=False)

    def run():
        if job["exported"]:
            return of_any_size(sources).ids[:, 0].numpy()
        return model.generate(sources, max_length=length, end_id=no_end).numpy()

    ids = run()
    return run, {"parameters": config.num_parameters, "output_shape": list(ids.shape),
                 "tokens_of_a_step": tokens_of_a_step(ids),
                 "versions": {"tensorflow": tf.__version__, "keras": keras.__version__}}
