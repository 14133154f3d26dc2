"""The result of a check of the installation."""

import dataclasses

OK, WARNING, PROBLEM = "ok", "warning", "problem"


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of the report; `cure` is what to type or change, empty where nothing is wrong."""

    check: str
    status: str
    found: str
    cure: str = ""
