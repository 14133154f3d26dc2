"""Files that appear complete or not at all."""

import pathlib
import secrets


def write_whole(path, content: str | bytes) -> None:
    """Puts a file in the place of what is there, in one step, whoever else may write or read it.

    Args:
        path: of a file in a folder that is there.
        content: of the file; text becomes UTF-8.

    Raises:
        OSError: it cannot be written; what was there is untouched, and nothing is left beside it.
    """
    path = pathlib.Path(path)
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(4)}.unfinished")
    try:
        unfinished.write_bytes(content if isinstance(content, bytes) else content.encode())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
