"""Every argument and result of a public function or method has a type; `make lint` checks that calls fit them."""

import ast
import pathlib

REPOSITORY = pathlib.Path(__file__).parents[2]


def public_functions(body, is_class=False):
    """Yields the public functions of a module, and the methods of its public classes."""
    for node in body:
        is_public = not getattr(node, "name", "_").startswith("_")
        if isinstance(node, ast.ClassDef) and is_public:
            yield from public_functions(node.body, is_class=True)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (
                is_public or is_class and node.name in ("__init__", "__call__")):
            yield node, is_class


def untyped(node, is_class):
    """Returns the names of the arguments without a type, and "return" for an untyped result."""
    given = node.args
    arguments = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
    is_static = any(isinstance(decorator, ast.Name) and decorator.id == "staticmethod"
                    for decorator in node.decorator_list)
    arguments = [argument for argument in arguments if argument is not None][is_class and not is_static:]
    names = [argument.arg for argument in arguments if argument.annotation is None]
    return names + ["return"] * (node.returns is None and node.name != "__init__")


def test_public_signatures_have_types():
    missing = {}
    for folder in ("switch_tf", "tasks"):
        for path in (REPOSITORY / folder).rglob("*.py"):
            for node, is_class in public_functions(ast.parse(path.read_text()).body):
                if names := untyped(node, is_class):
                    missing[f"{path.relative_to(REPOSITORY)}:{node.lineno} {node.name}"] = names
    assert not missing
