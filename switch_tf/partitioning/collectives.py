"""Collectives of a program cut over devices, parsed from DTensor's or XLA's text."""

import math
import os
import pathlib
import re
from collections.abc import Iterable
from typing import NamedTuple

# DTensor's pass that adds the collectives.
DTENSOR_STAGE = "DTensorSPMDExpansion"

_KINDS = {"DTensorAllToAll": "all-to-all", "DTensorAllReduce": "all-reduce", "DTensorAllGather": "all-gather",
          "DTensorReduceScatter": "reduce-scatter"}
_DTENSOR = re.compile(rf'"tf\.({"|".join(_KINDS)})"')
_RESULT = re.compile(r"-> \(?tensor<((?:\d+x)*)(\w+)>")
_LAYOUT = re.compile(r"(?:input|output)_layout = #dtensor\.layout<sharding_specs:([\w,]*?),? mesh:")
_XLA = re.compile(r" = (.*?) (all-to-all|all-reduce|all-gather|reduce-scatter|collective-permute)(?:-start)?\(")
_XLA_ARRAY = re.compile(r"([a-z]+\d*)\[([\d,]*)\]")


class Collective(NamedTuple):
    """One collective of a program.

    Attributes:
        kind: XLA's name, such as "all-to-all".
        bytes: Bytes of all results on one device.
        is_unsafe: Whether TensorFlow permutes the data, in an all-to-all between two dimensions other than the first.
            XLA never does.
    """

    kind: str
    bytes: int
    is_unsafe: bool = False


def dump_partitioned_programs(folder: str | pathlib.Path) -> None:
    """Makes TensorFlow write DTensor's programs into a folder. Call it before importing TensorFlow."""
    os.environ.update(TF_CPP_VMODULE="dtensor_mlir_passes=1", TF_DUMP_GRAPH_PREFIX=str(folder),
                      MLIR_BRIDGE_LOG_PASS_FILTER=DTENSOR_STAGE)


def read(folder: str | pathlib.Path, function: str) -> list[Collective]:
    """Returns the collectives of a traced function's newest dumped program, before TensorFlow combines them."""
    files = pathlib.Path(folder).glob(f"*{DTENSOR_STAGE}*__inference_{function}_*")
    newest = max(files, key=lambda path: path.stat().st_mtime_ns, default=None)
    collectives = []
    for line in newest.read_text().splitlines() if newest else ():
        if match := _DTENSOR.search(line):
            kind, is_unsafe = _KINDS[match[1]], False
            if kind == "all-to-all":
                before, after = (specs.split(",") for specs in _LAYOUT.findall(line))
                is_unsafe = len(before) >= 4 and before[0] == after[0]
            # Unknown text fails rather than omits a collective.
            lengths, dtype = _RESULT.search(line).groups()
            collectives.append(Collective(kind, _bytes(dtype, lengths.split("x")), is_unsafe))
    return collectives


def read_xla(text: str) -> list[Collective]:
    """Returns the collectives of XLA's text. Those in loops count once."""
    return [Collective(kind, sum(_bytes(dtype, lengths.split(",")) for dtype, lengths in _XLA_ARRAY.findall(shape)))
            for shape, kind in _XLA.findall(text)]


def _bytes(dtype, lengths):
    return math.prod(map(int, filter(None, lengths))) * max(8, int(re.sub(r"\D", "", dtype) or 8)) // 8  # i1, pred: 8


def summarize(collectives: Iterable) -> dict[str, dict[str, int]]:
    """Returns kind -> {"count", "bytes" on one device}."""
    summary = {}
    for collective in collectives:
        entry = summary.setdefault(collective.kind, {"count": 0, "bytes": 0})
        entry["count"] += 1
        entry["bytes"] += collective.bytes
    return summary
