"""Answers of the compiler that are kept in files: the same question twice is answered from there."""

import hashlib
import os
import pathlib
import tempfile
from importlib import metadata

import switch_tf
from switch_tf import environment
from switch_tf.refusals import Refusal
from switch_tf.storage.whole_file import write_whole


def answer_file(*question: str) -> pathlib.Path:
    """Where the answer to a question is kept: it has another place for another compiler, its flags or package, too.

    Args:
        question: all that the answer depends on, in any words: configuration, topology, depth.
    """
    key = hashlib.sha256()
    versions = [f"{name}={metadata.version(name)}" for name in ("tensorflow", "keras", "jaxlib", "libtpu")]
    for text in (*question, *versions, os.environ.get("LIBTPU_INIT_ARGS", "")):  # the compiler's flags
        key.update(text.encode())
    for file in sorted(pathlib.Path(switch_tf.__file__).parent.rglob("*.py")):
        key.update(file.read_bytes())
    return environment.cache_folder() / "compiled" / f"{key.hexdigest()[:24]}.json"


def write(file: pathlib.Path, content: str | bytes, say) -> bool:
    """Writes a file whole or not at all, as another process may write the same, or this be killed.

    Args:
        say: function of a line of text; told why a file could not be written.

    Returns:
        bool. Whether it was written.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, content)
    except OSError as error:
        say(f"{file} could not be written ({error.strerror}): only what is printed here is kept.")
        return False
    return True


def check_folder(flag: str, folder: pathlib.Path) -> None:
    """Refuses a folder that cannot be written to; creates it. `flag` names it in the sentence."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise Refusal(f"{flag} needs a folder that can be written to, and {str(folder)!r} is none ({error.strerror}); "
                      "name another.") from error
