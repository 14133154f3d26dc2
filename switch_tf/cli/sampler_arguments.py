"""Arguments of commands that decode: the sampler and its settings."""

import argparse

from etils import epy

from switch_tf import checks
from switch_tf.refusals import Refusal

with epy.lazy_imports():  # which import TensorFlow, so arguments are checked first
    from switch_tf import decoding

# Sampler -> (name, type, help) of its settings.
_SAMPLERS = {
    "greedy": (),
    "sample": (("temperature", float, "divides the logits; below 1 favours likely tokens (default 1)"),
               ("top_k", int, "number of most probable tokens to draw from"),
               ("top_p", float, "draw from the fewest tokens whose probabilities add up to this"),
               ("seed", int, "seed of the random numbers (default 0)")),
    "beam": (("num_beams", int, "sequences that are followed at a time (default 4)"),
             ("length_penalty", float, "T5's alpha, 0 for none (default 0.6)"),
             ("num_results", int, "sequences to write (default 1)")),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the sampler, its settings and the length."""
    parser.add_argument("--max_length", type=int, metavar="N",
                        help="tokens to decode at most (default: the targets of TASK_FEATURE_LENGTHS)")
    parser.add_argument("--sampler", choices=tuple(_SAMPLERS), default="greedy",
                        help="the most probable token (default), a drawn one, or beam search")
    for sampler, options in _SAMPLERS.items():
        for name, kind, meaning in options:
            parser.add_argument(f"--{name}", type=kind, metavar="X", help=f"with --sampler {sampler}: {meaning}")


def check(arguments: argparse.Namespace) -> None:
    """Refuses settings of samplers that are not chosen."""
    checks.optional("--max_length", arguments.max_length, checks.integer, 1)
    for sampler, options in _SAMPLERS.items():
        for name, *_ in options:
            if getattr(arguments, name) is not None and sampler != arguments.sampler:
                raise Refusal(f"--{name} goes with --sampler {sampler}, not {arguments.sampler}.")


def sampler(arguments: argparse.Namespace) -> "decoding.Sampler":
    """Returns the sampler of a command line.

    Raises:
        Refusal: A setting is out of its range.
    """
    options = {name: getattr(arguments, name) for name, *_ in _SAMPLERS[arguments.sampler]}
    return decoding.SAMPLERS[arguments.sampler](**{
        name: value for name, value in options.items() if value is not None})
