"""Compares a converted folder with its source: every weight, and logits where a model of both can be run here."""

from typing import Any

import numpy as np

from switch_tf.configs.switch_config import SwitchConfig
from switch_tf.conversion import portions
from switch_tf.conversion.formats import Format
from switch_tf.conversion.linked_weights import read_model
from switch_tf.conversion.shards import DTYPES
from switch_tf.conversion.weight_source import WeightSource
from switch_tf.hardware import host
from switch_tf.refusals import Refusal
from switch_tf.reporting import progress

_BYTES_PER_PARAMETER = 12  # of a model that is run, while it is read
_TOLERANCE = 1e-4  # of logits, relative to their standard deviation or 1
_BATCH, _LENGTHS = 2, (16, 8)  # sequences, and tokens of encoder and decoder


def verify(source: WeightSource, output: Any, to: Format, dtype: str) -> tuple[dict[str, Any], str]:
    """Compares a written folder with the weights that it was written of, rounded to `dtype`.

    All values, and so all norms, are compared, a portion at a time. Then a model of each side computes logits of a
    fixed batch, if both route tokens alike and this machine has the memory.

    Args:
        source: Weights of the source.
        output: Folder that was written.
        to: Its format.
        dtype: Name of the dtype of its tensors.

    Returns:
        (JSON object, sentence for people).

    Raises:
        Refusal: they differ, or the output cannot be read.
    """
    with to.at_hand(output) as local:
        written, source = to.open(local, None), _rounded(source, dtype)
        _compare_weights(source, written, output)
        result = {"weights": len(source.weights), "largest_logit_difference": None}
        sentence = f"All {len(source.weights)} weights in {output} have the values and norms of the source"
        if reason := _reason_not_to_run(source.config, written.config):
            return result, f"{sentence}; logits were not compared, because {reason}."
        result["largest_logit_difference"] = difference = _compare_logits(source, written, output)
        return result, f"{sentence}, and its logits differ by at most {difference:.2g}."


def _rounded(source, dtype):
    return source._replace(read=lambda name, rows: source.read(name, rows).astype(DTYPES[dtype]).astype(np.float32))


def _compare_weights(source, written, output):
    groups = portions.groups_of(source)
    with progress.bar(portions.num_bytes(groups), "verifying") as bar:
        for group in groups:
            for portion, values in portions.read(source, group, bar):
                found = written.read(portion.name, portion.rows)
                if not np.array_equal(values, found):
                    norms = [np.linalg.norm(each.ravel()) for each in (values, found)]
                    raise _different(output, f"rows {portion.rows.start} to {portion.rows.stop - 1} of "
                                             f"{portion.name!r} have the norm {norms[1]:.9g}, and {norms[0]:.9g} in "
                                             "the source")


def _different(output, what):
    return Refusal(f"{output} is not what its source is: {what}; remove it and convert again.")


def _reason_not_to_run(ours: SwitchConfig, theirs: SwitchConfig):
    """Returns why logits of the two configurations are not compared here, or None."""
    if ours.num_experts and (ours.semantics, ours.expert_capacity) != (theirs.semantics, theirs.expert_capacity):
        return "its experts have another capacity"
    needed, available = _BYTES_PER_PARAMETER * ours.num_parameters, host.memory("MemAvailable")
    if needed > available:
        return f"a model needs {needed / 1e9:,.1f} GB of memory, and {available / 1e9:,.1f} GB are free"
    return None


def _compare_logits(source, written, output):
    logits, found = (_logits(read_model(each)) for each in (source, written))
    difference = float(np.abs(logits - found).max())
    if not difference <= _TOLERANCE * max(1.0, logits.std()):
        raise _different(output, f"logits of a fixed batch differ by {difference:.2g}, with equal weights")
    return difference


def _logits(model):
    generator = np.random.default_rng(0)
    names = ("encoder_input_tokens", "decoder_input_tokens")[:1 if model.config.is_encoder_only else 2]
    return model({name: generator.integers(1, model.config.vocab_size, (_BATCH, length))
                  for name, length in zip(names, _LENGTHS, strict=False)}).numpy()
