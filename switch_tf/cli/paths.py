"""Checks of arguments that are paths, because a URL would become a local folder of that name."""

import argparse

from switch_tf import checks

# Metavars of arguments that are paths.
_PATHS = ("FILE", "FOLDER", "PATH", "RUN", "CHECKPOINT")
# (command, argument) of paths that TensorFlow's file system reads, which knows buckets.
_READABLE = {("vocabulary", "input")}


def check(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Refuses URLs among the paths of a command line.

    Args:
        parser: Parser of the command. The metavars of its arguments mark paths.
        arguments: Namespace that it has parsed.

    Raises:
        Refusal: An argument is a URL.
    """
    for action in parser._actions:
        words = action.metavar.split("|") if isinstance(action.metavar, str) else ()
        is_path = any(word.removesuffix("S") in _PATHS for word in words)
        if not is_path or (arguments.command, action.dest) in _READABLE:
            continue
        value = getattr(arguments, action.dest, None)
        for path in value if isinstance(value, list) else [value]:
            if isinstance(path, str) and path:
                checks.place(action.option_strings[0] if action.option_strings else str(action.metavar), path)
