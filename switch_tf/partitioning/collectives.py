"""Collectives of a program that was cut over devices, parsed from the text of DTensor or XLA.

DTensor writes its programs to the folder of `dump_partitioned_programs`.
"""

import math
import os
import pathlib
import re
from collections.abc import Iterable
from typing import NamedTuple

# The pass of DTensor after which a program contains its collectives.
DTENSOR_STAGE = "DTensorSPMDExpansion"

_KINDS = {"DTensorAllToAll": "all-to-all", "DTensorAllReduce": "all-reduce", "DTensorAllGather": "all-gather",
          "DTensorReduceScatter": "reduce-scatter"}
_BITS = {"i1": 8, "pred": 8, "bf16": 16, "f16": 16}
_XLA = re.compile(r" = (.*?) (all-to-all|all-reduce|all-gather|reduce-scatter|collective-permute)(?:-start)?\(")
_XLA_ARRAY = re.compile(r"([a-z]+\d*)\[([\d,]*)\]")


class Collective(NamedTuple):
    """One collective of a program.

    Attributes:
        kind: XLA's name, such as "all-to-all".
        shape: Shape of the result on one device.
        dtype: Dtype of the result in MLIR's words, such as "f32".
        moved: Dimensions that another mesh axis splits afterwards, for all-to-alls and all-gathers.
    """

    kind: str
    shape: tuple[int, ...]
    dtype: str
    moved: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Bytes of the result on one device."""
        return math.prod(self.shape) * _bits(self.dtype) // 8

    @property
    def is_unsafe(self) -> bool:
        """Whether TensorFlow permutes the data: an all-to-all between two dimensions that are not the first."""
        return self.kind == "all-to-all" and len(self.shape) >= 4 and 0 not in self.moved


class XlaCollective(NamedTuple):
    """One collective of a program that XLA has compiled.

    Attributes:
        kind: XLA's name, such as "all-to-all".
        bytes: Bytes of the results on one device, of all arrays that it moves.
        is_unsafe: False, because XLA moves data as it says.
    """

    kind: str
    bytes: int
    is_unsafe: bool = False


def dump_partitioned_programs(folder: str | pathlib.Path) -> None:
    """Makes TensorFlow write every program that DTensor cuts into a folder. Call it before TensorFlow is imported."""
    os.environ.update(TF_CPP_VMODULE="dtensor_mlir_passes=1", TF_DUMP_GRAPH_PREFIX=str(folder),
                      MLIR_BRIDGE_LOG_PASS_FILTER=DTENSOR_STAGE)


def read(folder: str | pathlib.Path, function: str) -> list[Collective]:
    """Returns the collectives of the newest program of a traced function, before TensorFlow combines any.

    Args:
        folder: Folder of the dumped programs.
        function: Name of the traced function.
    """
    files = list(pathlib.Path(folder).glob(f"*{DTENSOR_STAGE}*__inference_{function}_*"))
    if not files:
        return []
    newest = max(files, key=lambda path: path.stat().st_mtime_ns)
    return [_parse(line) for line in newest.read_text().splitlines() if _is_collective(line)]


def read_xla(text: str) -> list[XlaCollective]:
    """Returns the collectives of a program that XLA has compiled, each once, however often a loop repeats it."""
    return [XlaCollective(kind, sum(_bytes(dtype, lengths) for dtype, lengths in _XLA_ARRAY.findall(shape)))
            for shape, kind in _XLA.findall(text)]


def _bytes(dtype, lengths):
    return math.prod(int(length) for length in lengths.split(",") if length) * _bits(dtype) // 8


def _bits(dtype):
    return _BITS.get(dtype) or int(re.sub(r"\D", "", dtype))


def summarize(collectives: Iterable) -> dict[str, dict[str, int]]:
    """Returns kind -> {"count", "bytes" on one device} for objects with a `kind` and `bytes`."""
    summary = {}
    for collective in collectives:
        entry = summary.setdefault(collective.kind, {"count": 0, "bytes": 0})
        entry["count"] += 1
        entry["bytes"] += collective.bytes
    return summary


def _is_collective(line):
    return any(f'"tf.{name}"' in line for name in _KINDS)


def _parse(line):
    name = next(name for name in _KINDS if f'"tf.{name}"' in line)
    result = re.search(r"-> \(?tensor<((?:\d+x)*)(\w+)>", line)
    before, after = (re.search(rf"{side}_layout = #dtensor\.layout<sharding_specs:([\w,]*?),? mesh:", line)
                     for side in ("input", "output"))
    moved = ()
    if before and after:
        pairs = zip(before[1].split(","), after[1].split(","), strict=True)
        moved = tuple(dim for dim, (old, new) in enumerate(pairs) if old != new)
    return Collective(_KINDS[name], tuple(int(length) for length in result[1].split("x") if length), result[2], moved)
