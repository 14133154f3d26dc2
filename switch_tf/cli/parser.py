"""The parser of command-line arguments."""

import argparse
import re
from collections.abc import Iterable
from typing import Any, NoReturn

from switch_tf.configs import shipped_gin
from switch_tf.statuses import REFUSED


class Parser(argparse.ArgumentParser):
    """A parser that suggests a flag or macro for an unknown flag."""

    def error(self, message: str) -> NoReturn:
        unknown = re.search(r"unrecognized arguments: (?:--)?([\w./-]+)", message)
        macro = unknown and unknown[1].upper()
        if macro == "MODEL_DIR" and "--run" in self._option_string_actions:
            message += ". The folder of a finished run is given as --run"
        elif macro in shipped_gin.macros():
            message += f". {macro} is a macro of the gin files: --gin.{macro}=VALUE"
        elif unknown:
            message += f".{shipped_gin.hint(f'--{unknown[1]}', self._option_string_actions)}"
        self.exit(REFUSED, f"{self.prog}: {message}\n")  # argparse's usage would hide it


def option(name: str, help: str, metavar: str | None = None, one_of: Iterable[str] = (), goes_with: str = "",
           at_least: int | None = None, **rest: Any) -> tuple:
    """Declares an argument. With only a name and a help it is a flag.

    Args:
        metavar: FILE, FOLDER, PATH, RUN and CHECKPOINT stand for paths. Defaults to `one_of`.
        one_of: Values to choose from.
        goes_with: Option that must be given too, and the rest of the refusal: "--model; a run has its own.", or
            "--sampler beam, not {sampler}." for one of its values.
        **rest: See `argparse.ArgumentParser.add_argument`.

    Returns:
        (name, arguments of `add_argument`, what `main` checks).
    """
    if metavar or one_of:
        rest["metavar"] = metavar or "|".join(one_of)
    elif not rest:
        rest["action"] = "store_true"
    return name, {"help": help, **rest}, (one_of, goes_with, at_least)


def count(name: str, help: str, default: int | None = None, at_least: int = 1, **rest: Any) -> tuple:
    """Declares an integer."""
    return option(name, help, "N", at_least=at_least, type=int, default=default, **rest)
