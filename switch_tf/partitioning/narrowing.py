"""Products of widened bfloat16 numbers as products of the bfloat16 numbers themselves, with the same float32 sums.

TensorFlow has no product of bfloat16 numbers with a float32 result, so layers widen both operands, which is exact. A
TPU's compiler removes these casts. A GPU's does not, and would multiply at half the rate what takes twice the memory.
"""

from jax.extend.mlir import ir

_PRODUCTS = ("stablehlo.dot", "stablehlo.dot_general")
# Operations that only move numbers, through which a cast may be exchanged.
_MOVES = ("stablehlo.transpose", "stablehlo.reshape", "stablehlo.slice", "sdy.sharding_constraint")


def narrow(operation: ir.Operation) -> None:
    """Gives a matrix product of float32 the bfloat16 numbers that both of its operands were cast from, if so.

    A one-hot mask, cast from booleans, is cast to bfloat16. Other operations stay as they are, and casts without
    another use are left for the compiler to remove.
    """
    if operation.name not in _PRODUCTS or not _is_of(operation.results[0], ir.F32Type):
        return
    sources = [_source(value) for value in operation.operands]
    if all(sources):
        for index, (cast, moves) in enumerate(sources):
            operation.operands[index] = _moved(cast, moves)


def _source(value):
    """Returns the cast that a value comes from and the moves since then, in order; None if it cast other numbers."""
    moves = []
    while isinstance(value, ir.OpResult):
        operation = value.owner
        if operation.name == "stablehlo.convert":
            return (operation, moves[::-1]) if _is_exact_in_bfloat16(operation.operands[0]) else None
        if operation.name not in _MOVES:
            return None
        moves.append(operation)
        value = operation.operands[0]
    return None


def _moved(cast, moves):
    """Returns what was cast, in bfloat16, after the same moves."""
    value = cast.operands[0]
    if not _is_of(value, ir.BF16Type):
        value = _like(cast, value, {})
    for move in moves:
        value = _like(move, value, {name: move.attributes[name] for name in move.attributes})
    return value


def _like(operation, value, attributes):
    """Returns the result of the same operation on another value, in bfloat16."""
    shape = ir.RankedTensorType.get(operation.results[0].type.shape, ir.BF16Type.get())
    return ir.Operation.create(operation.name, [shape], [value], attributes, ip=ir.InsertionPoint(operation),
                               loc=operation.location).result


def _is_exact_in_bfloat16(value):
    return _is_of(value, ir.BF16Type) or value.type.element_type == ir.IntegerType.get_signless(1)


def _is_of(value, element_type):
    return isinstance(value.type.element_type, element_type)
