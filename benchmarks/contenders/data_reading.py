"""Packed span-corruption batches of the docs corpus on one core: from text, from the cache, or through seqio alone.

A process of its own: `python data_reading.py '{"reader": "text", ...}'` prints one JSON object. It holds itself to a
core, fills its buffers with `warm` batches and reads `batches` more without a pause, so that nothing is read ahead.
"""

import importlib
import json
import os
import resource
import sys
import time


def main():
    """Reads, and prints seconds on the clock, CPU seconds and the share of tokens that is not padding."""
    job = json.loads(sys.argv[1])
    os.sched_setaffinity(0, {job["core"]})  # before TensorFlow counts the cores
    started = time.perf_counter()
    iterator = iter(_batches(job))
    first = next(iterator)
    seconds_to_first = time.perf_counter() - started
    for _ in range(job["warm"]):
        next(iterator)
    started, cpu_seconds = time.perf_counter(), time.process_time()
    for _ in range(job["batches"]):
        next(iterator)
    features = [first[name].numpy() for name in ("encoder_input_tokens", "decoder_target_tokens")]
    filled = sum((tokens > 0).sum() for tokens in features) / sum(tokens.size for tokens in features)
    print(json.dumps({
        "seconds": time.perf_counter() - started, "cpu_seconds": time.process_time() - cpu_seconds,
        "share_filled": float(filled), "seconds_to_first": seconds_to_first,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}))


def _batches(job):
    import tensorflow as tf

    from switch_tf import data

    importlib.import_module("switch_tf.tasks.docs_corpus")  # which registers the task
    name, lengths = "docs_corpus_span_corruption", {"inputs": job["inputs"], "targets": job["targets"]}
    if job["reader"] == "seqio":
        import seqio

        dataset = seqio.get_dataset(name, lengths, dataset_split="train", shuffle=True, num_epochs=None, seed=0,
                                    feature_converter=seqio.EncDecFeatureConverter(pack=True))
        return dataset.batch(job["batch_size"], drop_remainder=True).prefetch(tf.data.AUTOTUNE)
    is_cached = job["reader"] == "cache"
    return data.get_dataset(data.DatasetDescription(
        name, lengths, job["batch_size"], pack=True, use_cached_tasks=is_cached,
        cache_dir=job["cache_dir"] if is_cached else None))


if __name__ == "__main__":
    main()
