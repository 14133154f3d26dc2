"""The progress bar of commands."""

import sys
from typing import Any

from tqdm import tqdm

_QUIET_SECONDS = 5  # before a bar appears
_REFRESH_SECONDS, _LINE_SECONDS = 0.5, 20  # between updates, on a terminal and in a file


def bar(total: int | None, description: str, unit: str = "B", initial: int = 0) -> Any:
    """Returns a context manager with a progress bar on standard error, shown after some seconds.

    The first `initial` of `total` do not count in the rate.
    """
    return tqdm(total=total, initial=initial, desc=description, unit=unit, unit_scale=unit == "B", file=sys.stderr,
                delay=_QUIET_SECONDS, dynamic_ncols=True,
                mininterval=_REFRESH_SECONDS if sys.stderr.isatty() else _LINE_SECONDS)
