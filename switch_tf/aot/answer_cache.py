"""Cached answers of the compiler, so that a repeated question compiles nothing."""

import hashlib
import os
import pathlib
import tempfile
from collections.abc import Callable

import switch_tf
from switch_tf import environment
from switch_tf.hardware import chips
from switch_tf.refusals import Refusal
from switch_tf.storage import places
from switch_tf.storage.whole_file import write_whole, writing

# Variables with flags of the compilers, and with the share of a GPU's memory.
_FLAGS = ("LIBTPU_INIT_ARGS", "XLA_FLAGS", *chips.SHARE_VARIABLES)


def answer_file(*question: str) -> pathlib.Path:
    """Returns the cache file of a question. It differs for other versions of the compiler, its flags and this package.

    Args:
        question: Texts that determine the answer: configuration, topology, depth.
    """
    key = hashlib.sha256()
    packages = ("tensorflow", "keras", "jaxlib", "libtpu", environment.cuda_plugin())
    versions = [f"{name}={environment.installed_version(name)}" for name in packages if name]
    for text in (*question, *versions, *(os.environ.get(flags, "") for flags in _FLAGS)):
        key.update(text.encode())
    for file in sorted(pathlib.Path(switch_tf.__file__).parent.rglob("*.py")):
        key.update(file.read_bytes())
    return environment.cache_folder() / "compiled" / f"{key.hexdigest()[:24]}.json"


def write(file: pathlib.Path, content: str | bytes, say: Callable[[str], None]) -> bool:
    """Writes a file whole or not at all, since another process may write it too and this one may be killed.

    Args:
        file: Path. Its folder is created.
        content: Text or bytes.
        say: Prints a line if the file could not be written.

    Returns:
        Whether the file was written.
    """
    try:
        with writing(file):
            file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, content)
    except Refusal as refusal:
        say(f"{refusal} Only what is printed here is kept.")
        return False
    return True


def check_outputs(save: str | None, plot: str | None) -> None:
    """Refuses a `--save` folder or a `--plot` file that cannot be written; creates the folders.

    Raises:
        Refusal: Names the flag.
    """
    if save is not None:
        _check_folder("--save", places.at(save))
    if plot is not None:
        if places.at(plot).is_dir():
            raise Refusal(f"--plot needs a file, and {plot!r} is a folder; name one in it, such as step.png.")
        _check_folder("--plot", places.at(plot).parent)


def _check_folder(flag, folder):
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if places.is_local(folder):
            with tempfile.TemporaryFile(dir=folder):
                pass
    except OSError as error:
        raise Refusal(f"{flag} needs a folder that can be written to, and {str(folder)!r} is none ({error.strerror}); "
                      "name another.") from error
