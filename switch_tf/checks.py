"""The one place that checks values: each function hands back what may be kept, or refuses it in one sentence.

numpy's integers and floats are as good as Python's and become those, so that what keeps them can be written as JSON.
True and False are no numbers, nor are NaN and infinities.
"""

import math
import numbers
from collections.abc import Mapping

# The words of a sentence that refuses a number, and what they mean.
_RULES = {
    "in [0, 1)": lambda value: 0 <= value < 1,
    "in (0, 1)": lambda value: 0 < value < 1,
    "in (0, 1]": lambda value: 0 < value <= 1,
    "above 0": lambda value: value > 0,
    "0 or above": lambda value: value >= 0,
}


def integer(name: str, value, at_least: int) -> int:
    """An integer that is large enough."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < at_least:
        raise ValueError(f"{name} must be an integer of at least {at_least}, not {value!r}.")
    return int(value)


def number(name: str, value, rule: str) -> int | float:
    """A finite number that a rule allows: "in [0, 1)", "in (0, 1)", "in (0, 1]", "above 0" or "0 or above"."""
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or not _RULES[rule](value):
        raise ValueError(f"{name} must be a number {rule}, not {value!r}.")
    return int(value) if isinstance(value, numbers.Integral) else float(value)


def flag(name: str, value) -> bool:
    """True or False; words such as "no", which count as true elsewhere, are refused."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, not {value!r}.")
    return value


def text(name: str, value) -> str:
    """Text that is not empty."""
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{name} must be text that is not empty, not {value!r}.")
    return value


def lengths(name: str, value) -> dict[str, int]:
    """The tokens of a sequence of inputs and of one of targets."""
    if not isinstance(value, Mapping) or set(value) != {"inputs", "targets"}:
        raise ValueError(f"{name} must give the tokens of \"inputs\" and \"targets\", such as "
                         f"{{'inputs': 128, 'targets': 29}}, not {value!r}.")
    return {feature: integer(f"{name}[{feature!r}]", value[feature], 1) for feature in ("inputs", "targets")}


def fields(record, names, check, *rule) -> None:
    """Puts what `check(name, value, *rule)` makes of them in the place of several fields of a frozen dataclass."""
    for name in names:
        object.__setattr__(record, name, check(name, getattr(record, name), *rule))
