"""Arguments that are paths: no command takes a URL where it would make a local folder of that name."""

from switch_tf import checks

# Metavars of arguments that are paths.
_PATHS = ("FILE", "FOLDER", "PATH", "RUN", "CHECKPOINT")
# Read by TensorFlow's own file system, which knows buckets: (command, argument).
_READABLE = {("vocabulary", "input")}


def check(parser, arguments) -> None:
    """Refuses URLs among the paths that a command was given.

    Args:
        parser: of the command, whose arguments say by their metavar that they are paths.
        arguments: what it has parsed.

    Raises:
        ValueError: names the argument.
    """
    for action in parser._actions:
        words = action.metavar.split("|") if isinstance(action.metavar, str) else ()
        is_path = any(word.removesuffix("S") in _PATHS for word in words)
        if not is_path or (arguments.command, action.dest) in _READABLE:
            continue
        value = getattr(arguments, action.dest, None)
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, str) and one:
                checks.local(action.option_strings[0] if action.option_strings else action.metavar, one)
