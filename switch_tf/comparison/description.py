"""Describes a comparison, without TensorFlow."""

import contextlib
import dataclasses
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from switch_tf import checks
from switch_tf.refusals import Refusal, first_line
from switch_tf.storage import places

_NAME = re.compile(r"\w[\w.-]*")
_FOLDER = re.compile(r"\{(\w[\w.-]*)\}")
# The driver sets them.
_OWN = ("MODEL_DIR", "SEED")


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Runs that differ in their model, trained on the same batches.

    For every seed a variant is an ordinary run in `<model_dir>/<variant>/seed_<seed>`. Its gin files are the variant's,
    then the common ones. Its bindings are the common ones, then the variant's, then the command line's.

    Args:
        model_dir: Folder of all runs and of the report.
        variants: Name -> list of gin files and bindings "NAME=VALUE". The baseline is the first variant without
            experts, else the first one.
        common: Gin files and bindings of all variants: task, run, layout.
        seeds: All variants are trained with each seed in turn.
        turn: Steps of a variant before the next one's turn, so that a busy machine slows all alike. The first two are
            not timed.
        may_differ: Fields of `Run` and `StepSettings` that may differ, named as in the error message.
        unequal_work: Variants that may differ from the baseline by over 2 % in FLOPs per token, without the router.
        trained_first: Variants trained before the rest. The rest may start or learn from them: "{name}" in a binding is
            the run folder of the variant `name` with the same seed, as in "TEACHER='{teacher}'".
    """

    model_dir: str
    variants: dict
    common: tuple = ()
    seeds: tuple = (0,)
    turn: int = 20
    may_differ: tuple = ()
    unequal_work: tuple = ()
    trained_first: tuple = ()

    def __post_init__(self):
        checks.place("Comparison.model_dir", self.model_dir)
        if not isinstance(self.variants, Mapping) or len(self.variants) < 2:
            raise Refusal("Comparison.variants must be a dict of at least two variants, each a name and its gin "
                          f"files and bindings, not {checks.shown(self.variants)}.")
        for name, words in self.variants.items():
            if not isinstance(name, str) or not _NAME.fullmatch(name):
                raise Refusal("The name of a variant becomes a folder: letters, digits, '_', '-' and '.', not "
                              f"{checks.shown(name)}.")
            check_words(f"Comparison.variants[{name!r}]", words)
        check_words("Comparison.common", self.common)
        seeds = self.seeds if isinstance(self.seeds, list | tuple) else (self.seeds,)
        seeds = tuple(checks.integer("Comparison.seeds", seed, 0) for seed in seeds)
        if not seeds or len(set(seeds)) != len(seeds):
            raise Refusal(f"Comparison.seeds must be a list of different integers, not {checks.shown(self.seeds)}.")
        object.__setattr__(self, "seeds", seeds)
        object.__setattr__(self, "turn", checks.integer("Comparison.turn", self.turn, 1))
        for field in ("may_differ", "unequal_work", "trained_first"):
            names = getattr(self, field)
            if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
                raise Refusal(f"Comparison.{field} must be a list of names, not {checks.shown(names)}.")
            for name in () if field == "may_differ" else names:
                if name not in self.variants:
                    raise Refusal(f"Comparison.{field} names {name!r}, and the variants are "
                                  f"{', '.join(self.variants)}.")
        if len(set(self.trained_first)) >= len(self.variants):
            raise Refusal("Comparison.trained_first names every variant; leave out those that are trained afterwards.")
        for variant, words in self.variants.items():
            for name in {name for word in words for name in _FOLDER.findall(word)} & self.variants.keys():
                if name not in self.trained_first or variant in self.trained_first:
                    raise Refusal(f"Comparison.variants[{variant!r}] needs the run folder of {name!r}, so {name!r} has "
                                  f"to be in Comparison.trained_first, and {variant!r} must not.")

    def folder(self, variant: str, seed: int) -> pathlib.Path:
        """Returns a run folder."""
        return places.at(self.model_dir) / variant / f"seed_{seed}"

    def words(self, variant: str, seed: int, bindings: Sequence[str] = ()) -> tuple[list[str], list[str]]:
        """Returns the gin files and bindings of a run, the command line's `bindings` last."""
        own = list(self.variants[variant])
        for name in self.trained_first:
            folder = str(self.folder(name, seed))
            own = [word if word.endswith(".gin") else word.replace(f"{{{name}}}", folder) for word in own]
        files = [word for word in (*own, *self.common) if word.endswith(".gin")]
        bound = [word for word in (*self.common, *own) if not word.endswith(".gin")]
        return files, [*bound, *bindings, f"MODEL_DIR={str(self.folder(variant, seed))!r}", f"SEED={seed}"]


def check_words(name: str, words: Any) -> None:
    """Refuses words other than gin files and bindings. Errors begin with `name`."""
    if not isinstance(words, list | tuple) or not all(isinstance(word, str) for word in words):
        raise Refusal(f"{name} must be a list of gin files and bindings, not {checks.shown(words)}.")
    for word in words:
        bound, equals, _ = word.partition("=")
        if not word.endswith(".gin") and not equals:
            raise Refusal(f"{name} holds {word!r}, which is neither a gin file (its name ends in .gin) nor a "
                          "binding (NAME=VALUE).")
        if bound.strip() in _OWN:
            raise Refusal(f"{name} holds {word!r}, but each run gets its own {bound.strip()}: set "
                          "Comparison.model_dir and Comparison.seeds.")


@contextlib.contextmanager
def naming(variant: str) -> Iterator[None]:
    """Adds a variant's name to an exception: before a Refusal's message, else as a note."""
    try:
        yield
    except Refusal as error:
        named = Refusal(f"{variant}: {first_line(error)}")
        named.exit_status = error.exit_status
        raise named from error
    except Exception as error:
        error.add_note(f"It ended the variant {variant}.")
        raise
