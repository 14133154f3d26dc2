"""The form of an input of texts, and the fields that are read from it."""

from collections.abc import Sequence

from switch_tf import data
from switch_tf.refusals import Refusal


def form_of(path: str, has_fields: bool) -> str:
    """Returns the form of an input, one of `data.rows.KINDS`.

    Args:
        path: Path of a file, whose ending decides, or "-" for standard input.
        has_fields: Whether fields are chosen, so that lines without an ending are JSON objects.
    """
    form = None if path == "-" else data.kind_of(path)
    return "json" if has_fields and form in (None, "lines") else form or "lines"


def choose_all(field: str | None, target_field: str | None, has_targets: bool, defaults: Sequence[str],
               form: str) -> list[str | int]:
    """Returns the keys or columns of inputs and, if wanted, of targets.

    Args:
        field, target_field: Values of the options, or None.
        has_targets: Whether targets are read.
        defaults: Fields of inputs and targets that the run was trained on.
        form: From `form_of`.

    Raises:
        Refusal: See `choose`.
    """
    fields = [choose("--field", field, defaults[0], form)]
    return [*fields, choose("--target_field", target_field, defaults[1], form)] if has_targets else fields


def choose(flag: str, chosen: str | None, default: str | int, form: str) -> str | int:
    """Returns the key or column of a text.

    Args:
        flag: Option that chooses the field, for the message.
        chosen: Value of the option, or None.
        default: Key or number of a column that the run was trained on.
        form: From `form_of`.

    Raises:
        Refusal: The default is the number of a column, and JSON objects have none.
    """
    is_table = form in ("tsv", "csv")
    if chosen:
        return int(chosen) if is_table and chosen.isdecimal() else chosen
    if is_table or isinstance(default, str):
        return default
    if form == "lines":  # the whole line, whatever its name
        return "inputs"
    raise Refusal(f"The run was trained on column {default} of tables, and this input holds JSON objects: name the key "
                  f"of the text with {flag}.")
