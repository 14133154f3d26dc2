"""The result of a check of the installation."""

import dataclasses

OK, WARNING, PROBLEM = "ok", "warning", "problem"


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of the report. `cure` is a command or a change, empty if nothing is wrong."""

    check: str
    status: str
    found: str
    cure: str = ""
