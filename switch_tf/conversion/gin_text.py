"""Assignments in a gin file, read as text. Nothing is imported, included, called or evaluated but literals.

A file may come from anywhere, so its size and the depth of its values are limited.
"""

import ast
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from switch_tf import checks
from switch_tf.refusals import Refusal

_MAX_BYTES = 2**20
_MAX_VALUE = 4096  # characters
_MAX_STATEMENT = 2**16  # characters
_MAX_CHAIN = 20  # macros that stand for one another
_NAME = r"[\w./]+"
_ASSIGNMENT = re.compile(rf"({_NAME})\s*=\s*(.+)", re.DOTALL)
_BLOCK = re.compile(rf"({_NAME})\s*:")
_MACRO = re.compile(rf"%({_NAME})")
_REFERENCE = re.compile(rf"@({_NAME})(?:\(\))?")


class Reference(NamedTuple):
    """A value such as `@dense.MlpBlock()`, by its name without `@` and brackets."""

    name: str


class Unread(NamedTuple):
    """A value that is none of literal, macro and reference, or a macro that the file does not define."""

    text: str


def read(path: Any) -> tuple[dict[str, Any], list[str]]:
    """Returns the values of a file, full name -> value, and the files that it includes, which are not read.

    A value is a literal, a Reference, or Unread. A macro is replaced by its value; the last assignment counts.

    Raises:
        Refusal: The file is too large or is no gin file.
    """
    if path.stat().st_size > _MAX_BYTES:
        raise Refusal(f"{path} is larger than the {_MAX_BYTES} bytes that are read of a gin file; give the model's "
                      "configuration with --gin_file.")
    texts, includes = {}, []
    for name, text in _assignments(path):
        if name == "include":
            includes.append(text.strip("'\""))
        else:
            texts[name] = text
    return {name: _value(text, texts) for name, text in texts.items()}, includes


def _assignments(path) -> Iterator[tuple[str, str]]:
    """Yields the name and the text of each assignment."""
    block = None
    for is_indented, statement in _statements(path):
        block = block if is_indented else None
        if statement.startswith(("import ", "from ")):
            continue
        if statement.startswith("include "):
            yield "include", statement.removeprefix("include ").strip()
        elif match := _ASSIGNMENT.fullmatch(statement):
            yield (f"{block}.{match[1]}" if block else match[1]), match[2].strip()
        elif match := _BLOCK.fullmatch(statement):
            block = match[1]
        else:
            raise Refusal(f"{path} has the line {checks.shown(statement)}, which is no assignment; give the model's "
                          "configuration with --gin_file.")


def _statements(path) -> Iterator[tuple[bool, str]]:
    """Yields each statement without comments, its lines joined, and whether it is indented."""
    pending, num_open = "", 0
    for line in path.read_bytes().decode(errors="replace").splitlines():
        line = _without_comment(line)
        if not pending and not line.strip():
            continue
        if len(pending) > _MAX_STATEMENT:
            raise Refusal(f"{path} has a statement of more than {_MAX_STATEMENT} characters; give the model's "
                          "configuration with --gin_file.")
        is_open = line.endswith("\\")
        pending += f"{line.removesuffix(chr(92))}\n"
        num_open += _num_open(line)
        if is_open or num_open > 0 or pending.rstrip().endswith("="):
            continue
        yield pending[0].isspace(), pending.strip()
        pending, num_open = "", 0
    if pending.strip():
        yield pending[0].isspace(), pending.strip()


# A text ends with its line at the latest, so that no part of a line is looked at twice.
_TEXT = re.compile(r"'(?:\\.|[^'\\\n])*(?:'|\\?$)|\"(?:\\.|[^\"\\\n])*(?:\"|\\?$)", re.MULTILINE)


def _without_comment(line):
    covered = _TEXT.sub(lambda match: "x" * len(match[0]), line)
    return line[:covered.index("#")].rstrip() if "#" in covered else line.rstrip()


def _num_open(text):
    covered = _TEXT.sub("", text)
    return sum(covered.count(one) for one in "([{") - sum(covered.count(one) for one in ")]}")


def _value(text: str, texts: Mapping[str, str]):
    for _ in range(_MAX_CHAIN):
        match = _MACRO.fullmatch(text)
        if match is None or match[1] not in texts:
            break
        text = texts[match[1]]
    if match := _REFERENCE.fullmatch(text):
        return Reference(match[1])
    if len(text) > _MAX_VALUE:
        return Unread(text)
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return Unread(text)
