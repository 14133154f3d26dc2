"""Removes leftovers of kills from a run folder.

Foreign files stay, and are renamed only if the run needs their names.
"""

import re
from typing import Any

from switch_tf.storage import outputs, whole_file

_UNFINISHED = re.compile(r"\..+\.[0-9a-f]{8}\.unfinished", re.DOTALL)


def remove_unfinished(folder: Any) -> None:
    """Removes what a kill left under temporary names."""
    for entry in sorted(folder.iterdir()) if folder.is_dir() else ():
        if _UNFINISHED.fullmatch(entry.name):
            remove(entry)


def remove(path: Any) -> bool:
    """Removes a file, link or folder; returns whether it is gone. A failure is a warning."""
    try:
        if path.is_dir() and not path.is_symlink():
            whole_file.remove_tree(path)
        else:
            whole_file.remove(path)
    except OSError as error:
        outputs.say(f"{path} could not be removed ({error.strerror}); it does no harm, so the run goes on. Remove it "
                    "by hand.")
        return False
    return True


def make_room(path: Any, is_folder: bool = False) -> None:
    """Renames anything else at a path where a run needs a file (or a folder)."""
    is_right = path.is_dir() if is_folder else path.is_file()
    if is_right or not (path.exists() or path.is_symlink()):
        return
    kind = "folder" if is_folder else "file"
    outputs.say(f"{path} is no {kind}, so it is kept as {set_aside(path)}, and the run makes a {kind} of its own.")


def set_aside(path: Any) -> Any:
    """Renames a path to `broken.<name>`, or `broken.<name>.<number>`; returns its new place."""
    whole_file.check_owned(path)
    aside, number = path.with_name(f"broken.{path.name}"), 1
    while aside.exists() or aside.is_symlink():
        aside, number = path.with_name(f"broken.{path.name}.{number}"), number + 1
    return path.rename(aside)  # in a bucket every object of a folder is copied and removed
