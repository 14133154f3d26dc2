"""Packed span-corruption batches of the docs corpus on one core: from text, from the cache, and through seqio alone."""

import importlib
import os
import time


def reading(job):
    """Returns a function that reads `batches` batches, and the share of their tokens that is not padding.

    Args:
        job: dict. "reader": "text", "cache" or "seqio"; "core": int, the one core to run on; "cache_dir"; "batches",
            "batch_size", "inputs", "targets".
    """
    os.sched_setaffinity(0, {job["core"]})  # before TensorFlow counts the cores
    lengths = {"inputs": job["inputs"], "targets": job["targets"]}
    started = time.perf_counter()
    iterator = iter(_batches(job, lengths))
    first = next(iterator)
    seconds_to_first = time.perf_counter() - started

    def run():
        for _ in range(job["batches"]):
            next(iterator)

    features = [first[name].numpy() for name in ("encoder_input_tokens", "decoder_target_tokens")]
    filled = sum((tokens > 0).sum() for tokens in features) / sum(tokens.size for tokens in features)
    return run, {"seconds_to_first": round(seconds_to_first, 2), "share_filled": round(float(filled), 4)}


def _batches(job, lengths):
    import tensorflow as tf

    from switch_tf import data
    importlib.import_module("switch_tf.tasks.docs_corpus")  # which registers the task

    name = "docs_corpus_span_corruption"
    if job["reader"] == "seqio":
        import seqio

        dataset = seqio.get_dataset(name, lengths, "train", shuffle=True, num_epochs=None, seed=0,
                                    feature_converter=seqio.EncDecFeatureConverter(pack=True))
        return dataset.batch(job["batch_size"], drop_remainder=True).prefetch(tf.data.AUTOTUNE)
    is_cached = job["reader"] == "cache"
    return data.get_dataset(data.DatasetDescription(
        name, lengths, job["batch_size"], pack=True, use_cached_tasks=is_cached,
        cache_dir=job["cache_dir"] if is_cached else None))

