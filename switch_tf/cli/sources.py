"""What modules define, read from their sources: importing them takes seconds, and mistakes can be told before."""

import ast
import functools
import sys

# Packages whose sources tell what they define; others may set names while they are imported, as TensorFlow does.
_PLAIN = ("switch_tf", "keras")
# What may define names that its source does not show.
_ANYTHING = {"*", "__getattr__"}


def missing(name: str, modules) -> tuple[str, str, set[str]] | None:
    """Where a name leads nowhere: the module, the part of the name that it lacks, and the names that it has.

    None where the name exists, or where that is not seen from the sources alone.

    Args:
        name: such as "switch_tf.optim.schedules.RsqrtDecay".
        modules: those that are imported; a name that starts with none of them is not known.
    """
    module = max((module for module in modules if name.startswith(f"{module}.")), key=len, default=None)
    if module is None or module.partition(".")[0] not in _PLAIN:
        return None
    for part in name.removeprefix(f"{module}.").split("."):
        if _spec(f"{module}.{part}") is not None:
            module = f"{module}.{part}"
            continue
        names = defined(module)
        return None if names is None or part in names else (module, part, names)
    return None


def are_plain(modules) -> bool:
    """Whether all modules are of packages that register nothing with gin by themselves."""
    return all(module.partition(".")[0] in (*_PLAIN, "__gin__") for module in modules)


def defined(module: str) -> set[str] | None:
    """The names at the top of a module; None where its source does not tell them all."""
    tree = _tree(module)
    if tree is None:
        return None
    names, waiting = set(), list(tree.body)
    while waiting:
        match waiting.pop():
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                names |= {alias.asname or alias.name.partition(".")[0] for alias in aliases}
            case ast.Assign() | ast.AnnAssign() as statement:
                names |= {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
            case statement:  # what stands within an `if` or a `try` counts
                waiting += [node for node in ast.iter_child_nodes(statement)
                            if isinstance(node, ast.stmt | ast.excepthandler)]
    return None if names & _ANYTHING else names


def decorated(module: str, decorator: str) -> set[str]:
    """The functions and classes at the top of a module that have a decorator such as "gin.configurable"."""
    tree = _tree(module)
    return {node.name for node in (tree.body if tree else ())
            if isinstance(node, ast.FunctionDef | ast.ClassDef)
            and any(ast.unparse(one).partition("(")[0] == decorator for one in node.decorator_list)}


def texts(module: str) -> set[str]:
    """All texts that are written out in a module."""
    tree = _tree(module)
    constants = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)) if tree else ()
    return {value for value in constants if isinstance(value, str)}


def task_names(module: str) -> set[str]:
    """Returns the names under which a module of tasks registers tasks and mixtures, where its source spells them out.

    These are constants that are passed to `add`, `add_task` or `add_mixture`, and the keys of a dictionary that a loop
    around such a call goes over. Names that are computed in another way are missing.
    """
    tree = _tree(module)
    if not tree:
        return set()
    names = {call.args[0].value for call in _registrations(tree) if isinstance(call.args[0], ast.Constant)}
    keys = {target.id: statement.value.keys for statement in tree.body if isinstance(statement, ast.Assign)
            and isinstance(statement.value, ast.Dict) for target in statement.targets if isinstance(target, ast.Name)}
    for loop in (node for node in tree.body if isinstance(node, ast.For)):
        first = loop.target.elts[0] if isinstance(loop.target, ast.Tuple) else loop.target
        if any(ast.dump(call.args[0]) == ast.dump(ast.Name(first.id, ast.Load())) for call in _registrations(loop)):
            dictionaries = {node.id for node in ast.walk(loop.iter) if isinstance(node, ast.Name)}
            names |= {key.value for name in dictionaries for key in keys.get(name, ()) if isinstance(key, ast.Constant)}
    return {name for name in names if isinstance(name, str)}


def _registrations(tree):
    """Yields calls of functions that register a task or a mixture, with its name as first argument."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.args:
            called = getattr(node.func, "attr", getattr(node.func, "id", "")).lstrip("_")
            if called in ("add", "add_task", "add_mixture"):
                yield node


def is_among(name: str, texts: set[str]) -> bool:
    """Whether a task may be one of those that texts name: by itself, or, by a name before a dot, with its mixture."""
    return name in texts or any(name.startswith(f"{text}.") for text in texts if text)


def with_imported(modules, package: str) -> set[str]:
    """Modules, and the modules of a package that they import, that those import, and so on."""
    found, waiting = set(), set(modules)
    while waiting:
        module = waiting.pop()
        found.add(module)
        imports = [node for node in ast.walk(_tree(module) or ast.Pass()) if isinstance(node, ast.ImportFrom)]
        waiting |= {f"{package}.{alias.name}" for node in imports if node.module == package for alias in node.names
                    if _spec(f"{package}.{alias.name}") is not None} - found
        waiting |= {node.module for node in imports if (node.module or "").startswith(f"{package}.")} - found
    return found


@functools.cache
def _tree(module):
    spec = _spec(module)
    try:
        return spec and spec.origin and ast.parse(open(spec.origin, "rb").read())
    except (OSError, SyntaxError, ValueError):  # no source, which the import will show
        return None


@functools.cache
def _spec(module):
    """As importlib.util.find_spec, which would import the packages above a module."""
    above = module.rpartition(".")[0]
    if above:
        package = _spec(above)
        if package is None or package.submodule_search_locations is None:
            return None
    path = list(package.submodule_search_locations) if above else None
    found = (finder.find_spec(module, path, None) for finder in sys.meta_path)
    return next((spec for spec in found if spec is not None), None)
