"""Options of all benchmarks, and the contenders that they select."""

import argparse
import dataclasses
import fnmatch
import pathlib

from workers import Contender


def add_arguments(parser):
    """Adds the options to an `argparse.ArgumentParser`."""
    parser.add_argument("--contenders", nargs="+", metavar="PATTERN", default=["*"],
                        help="names, or patterns such as 'switch_tf/*'; the baseline always takes part")
    parser.add_argument("--rounds", type=_at_least_one, default=10, help="timings of each contender")
    parser.add_argument("--peer_python", metavar="PATH",
                        help="a Python with torch, transformers, jax, flax, optax, chex and gin-config")
    parser.add_argument("--flaxformer", metavar="PATH", help="a checkout of google/flaxformer")
    parser.add_argument("--before", metavar="PATH", type=_checkout,
                        help="another checkout of switch_tf, an older one say: its contenders take turns with ours, "
                             "as before/NAME")
    parser.add_argument("--plot", metavar="PNG", help="draw the results")


def add_accelerator_arguments(parser):
    """Adds the options of benchmarks that can run on a GPU or TPU."""
    parser.add_argument("--accelerator", action="store_true",
                        help="run on this machine's GPU or TPU: switch_tf by its pjrt back end, the peers by their own")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32",
                        help="of products and activations; weights are float32")


def _at_least_one(text):
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


def _checkout(text):
    folder = pathlib.Path(text).expanduser().resolve()
    if not (folder / "switch_tf" / "__init__.py").exists():
        raise argparse.ArgumentTypeError(f"must be a folder with switch_tf/ in it, not {text}")
    return str(folder)


def with_earlier(args, contenders: list[Contender]) -> list[Contender]:
    """Returns our contenders, followed by a twin of each that runs the package of `--before`."""
    twins = [dataclasses.replace(contender, name=f"before/{contender.name}",
                                 environment={**contender.environment, "PYTHONPATH": args.before})
             for contender in contenders if args.before and contender.name.startswith("switch_tf/")]
    return contenders + twins


def peers(args, hugging_face: dict, flaxformer: dict) -> list[Contender]:
    """Returns contenders of other packages, left out with a note if the options do not name their place.

    Args:
        args: Parsed options.
        hugging_face, flaxformer: Name -> job.
    """
    python, note = args.peer_python, ""
    if not python:
        note = "left out: give --peer_python, a Python with torch and transformers, jax and flax"
    on_accelerator = getattr(args, "accelerator", False)
    contenders = [Contender(name, python, job, note, on_accelerator=on_accelerator)
                  for name, job in hugging_face.items()]
    checkout = args.flaxformer and str(pathlib.Path(args.flaxformer).expanduser().resolve())
    if not checkout:
        python, note = None, "left out: give --flaxformer, a checkout of google/flaxformer"
    return contenders + [Contender(name, python, {**job, "flaxformer": checkout}, note, on_accelerator=on_accelerator)
                         for name, job in flaxformer.items()]


def chosen(contenders: list[Contender], patterns: list[str], baseline: str) -> list[Contender]:
    """Returns the contenders that match one of the patterns, and the baseline."""
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(contender.name, pattern) for contender in contenders):
            raise SystemExit(f"No contender matches {pattern!r}; there are "
                             f"{', '.join(contender.name for contender in contenders)}.")
    return [contender for contender in contenders if contender.name == baseline
            or any(fnmatch.fnmatchcase(contender.name, pattern) for pattern in patterns)]
