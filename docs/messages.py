"""The messages of all errors, read from the source: literals, constants, and results of functions."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
# Control flow, and exceptions that another part of the code replaces by a message.
_INTERNAL: Final = (
    "SystemExit",
    "KeyboardInterrupt",
    "StopIteration",
    "Unsupported",
    "DifferentDraws",
    "NotSent",
    "Terminated",
    "Interrupted",
)
_LEAST: Final = 20  # characters: shorter texts are of protocols, not for users
_DEPTH: Final = 4
Values = dict[str, list[ast.expr]]


def packages() -> Iterator[tuple[str, Sequence[Path]]]:
    """Yield the name and the files of each package whose errors users see."""
    folders = [ROOT / "fabricx", *sorted(path for path in (ROOT / "fabricx").iterdir() if path.is_dir())]
    for folder in folders:
        if folder.name not in ("testing", "pytorch", "__pycache__"):
            inner = folder.glob("*.py") if folder == ROOT / "fabricx" else folder.rglob("*.py")
            yield ".".join(folder.relative_to(ROOT).parts), sorted(inner)


def all_messages() -> dict[str, list[tuple[str, str]]]:
    """Return exception and message, in Markdown, of each error of each package."""
    trees = {name: [ast.parse(file.read_text()) for file in files] for name, files in packages()}
    shared = public([assigned(tree) for found in trees.values() for tree in found])
    return {name: sorted({entry for tree in found for entry in raised(tree, shared)}) for name, found in trees.items()}


def public(modules: Sequence[Values]) -> Values:
    """Return what other modules can mean by a name: constants, functions that a single module has, and refusals."""
    found: Values = {}
    for values in modules:
        for name, nodes in values.items():
            if name.isupper() or name.endswith(("()", "_refused")):
                found.setdefault(name, []).extend(nodes)
    several = {name for name in found if name.endswith("()") and sum(name in values for values in modules) > 1}
    return {name: nodes for name, nodes in found.items() if name not in several}


def assigned(tree: ast.AST) -> Values:
    """Return the expressions that names, attributes and functions can stand for, by name."""
    values: Values = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                values.setdefault(_name(target), []).append(node.value)
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            values.setdefault(_name(node.target), []).append(node.value)
        elif isinstance(node, ast.FunctionDef):
            returned = [part.value for part in ast.walk(node) if isinstance(part, ast.Return) and part.value]
            values.setdefault(f"{node.name}()", []).extend(returned)
    return values


def raised(tree: ast.AST, shared: Values) -> Iterator[tuple[str, str]]:
    """Yield exception and message of each `raise`.

    Args:
        tree: a module.
        shared: what the names stand for that the module imports.

    >>> code = 'TEXT = "{name} is too large; set a smaller one"\\ndef f(x): raise ValueError(TEXT.format(name=x))'
    >>> set(raised(ast.parse(code), {}))
    {('ValueError', '<em>name</em> is too large; set a smaller one')}
    >>> code = 'def f(x): raise full(x)\\ndef full(x): return OSError(f"the disk of {x} is full; delete files")'
    >>> set(raised(ast.parse(code), {}))
    {('OSError', 'the disk of <em>x</em> is full; delete files')}
    """
    module = public([assigned(tree)])
    for scope in [tree, *(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))]:
        local = assigned(scope) if isinstance(scope, ast.FunctionDef) else {}
        for node in ast.walk(scope):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                yield from _of_exception(node.exc, [local, module, shared])


def _of_exception(call: ast.Call, scopes: list[Values], depth: int = 0) -> Iterator[tuple[str, str]]:
    name = _name(call.func)
    if name.strip("_")[:1].islower():  # a function that returns the exception
        for value in _values(f"{name}()", scopes) if depth < _DEPTH else []:
            if isinstance(value, ast.Call):
                yield from _of_exception(value, scopes[1:], depth + 1)
    elif call.args and name not in _INTERNAL:
        for text in _texts(call.args[-1 if name.endswith("OSError") or name == "PermissionError" else 0], scopes):
            if len(text) > _LEAST:
                yield name, text


def _texts(node: ast.expr, scopes: list[Values], depth: int = 0) -> list[str]:
    """Return the messages, in Markdown, that an expression can be; none if it is computed elsewhere."""
    if (text := _template(node, scopes)) is not None:
        return [text]
    if isinstance(node, ast.IfExp):
        return [*_texts(node.body, scopes, depth), *_texts(node.orelse, scopes, depth)]
    if isinstance(node, ast.BoolOp):
        return [text for value in node.values for text in _texts(value, scopes, depth)]
    if isinstance(node, (ast.Name, ast.Attribute)) and depth < _DEPTH:
        return [text for value in _values(_name(node), scopes) for text in _texts(value, scopes, depth + 1)]
    if isinstance(node, ast.Call) and depth < _DEPTH:
        if isinstance(node.func, ast.Attribute) and node.func.attr == "format":
            return [_FIELD.sub(r"<em>\1</em>", text) for text in _texts(node.func.value, scopes, depth)]
        values = _values(f"{_name(node.func)}()", scopes)
        return [text for value in values for text in _texts(value, scopes[1:] or scopes, depth + 1)]
    return []


_FIELD: Final = re.compile(r"\\\{((?:\w|\\_)*)[^}]*?\\\}")


def _values(name: str, scopes: list[Values]) -> list[ast.expr]:
    return next((scope[name] for scope in scopes if scope.get(name)), [])


def _name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _template(node: ast.expr, scopes: list[Values]) -> str | None:
    """Return a text in Markdown, with placeholders for values; None if the expression is no text."""
    if isinstance(node, ast.Constant):
        return _escaped(str(node.value)).replace("\n", "<br>") if isinstance(node.value, str) else None
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        parts = (_template(node.left, scopes), _template(node.right, scopes))
        return "".join(part or "…" for part in parts) if any(parts) else None
    if not isinstance(node, ast.JoinedStr):
        return None
    parts = (_template(part, scopes) or _constant(part, scopes) or f"<em>{_value(part)}</em>" for part in node.values)
    return "".join(parts)


def _constant(node: ast.expr, scopes: list[Values]) -> str | None:
    """Return the text of a constant in a message; None for other values."""
    inner = node.value if isinstance(node, ast.FormattedValue) else node
    values = _values(_name(inner), scopes) if _name(inner).strip("_").isupper() else []
    if len(values) == 1 and isinstance(values[0], ast.Constant) and isinstance(values[0].value, (int, float)):
        return f"{values[0].value:g}"
    return _template(values[0], scopes) if len(values) == 1 else None


def _value(node: ast.expr) -> str:
    inner = node.value if isinstance(node, ast.FormattedValue) else node
    while isinstance(inner, ast.Attribute) and inner.attr in ("__name__", "__qualname__"):  # `type(x).__name__`: of x
        inner = inner.value
    if isinstance(inner, ast.Call) and inner.args and _name(inner.func) in ("type", "len", "sorted", "name_of"):
        inner = inner.args[0]
    return "class" if _name(inner) == "self" else _escaped(_name(inner).strip("_")) or "…"


def _escaped(text: str) -> str:
    return re.sub(r"([\\`*_{}\[\]#|])", r"\\\1", text).replace("<", "&lt;").replace(">", "&gt;")
