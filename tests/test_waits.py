"""Every blocking call of the source is listed in `docs/waits.md` with the event that ends it."""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sources import ROOT, parsed, trees

TABLE = ROOT / "docs" / "waits.md"
ALWAYS = {
    "wait", "wait_for", "accept", "recv", "recv_bytes", "recv_into", "recv_handle", "acquire", "sleep", "flock",
    "lockf", "communicate", "sigwait", "sigwaitinfo", "waitpid", "check_call", "check_output", "result", "as_completed",
    "send", "sendall", "sendmsg", "send_bytes", "send_handle", "init_process_group", "new_group", "batch_isend_irecv",
    "barrier",
}  # fmt: skip
COLLECTIVES = {
    "all_reduce", "all_gather", "broadcast", "reduce_scatter_tensor", "all_gather_into_tensor", "all_to_all_single",
}  # fmt: skip
LOCKS = {"Lock", "RLock", "Condition", "Semaphore", "BoundedSemaphore"}
NOT_PROCESSES = ("placement", "path", "tree", "memory_checkpoint", "sep", "shlex")  # other objects with a `join`


# Names that `waits` examines.
NAMES = ALWAYS | COLLECTIVES | {"join", "get", "poll", "read", "write", "run", "select", "connect"}


def waits(name: str, receiver: ast.expr | None, call: ast.Call) -> bool:
    """Return whether a call may block: by its name, and for common names by its receiver and arguments."""
    if name not in NAMES:
        return False
    text = "" if receiver is None else ast.unparse(receiver).lower()
    if name in ALWAYS:
        return "world" not in text  # the collectives of `World` are in the table
    if name in COLLECTIVES:
        return text == "dist"
    if name == "join":  # of a thread or process; `join` of a string has an argument that isn't a number of seconds
        texts = isinstance(receiver, (ast.Constant, ast.JoinedStr)) or text.endswith(NOT_PROCESSES)
        seconds = not call.args or isinstance(call.args[0], (ast.Name, ast.Call, ast.Constant, ast.BinOp))
        return receiver is not None and not texts and seconds and "world" not in text
    if name == "get" and not ast.unparse(call.func).partition(".")[0].isupper():  # of a constant table
        return "store" in text or "queue" in text or "tasks" in text or text == "signed"
    if name == "poll":
        return text != "select" and "writer" not in text and text != "session.checkpoints"
    if name == "read":  # of a descriptor; files are read through objects
        return text == "os"
    if name == "write":  # of a pipe, or a file that may be a pipe; `open` returns files on a disk
        return text in ("os", "stdin", "sys.stdout")
    if name in ("run", "select"):
        return text == "subprocess" or (name, text) == ("select", "select")
    return name == "connect" and text in ("peer", "authentication")


def locks(tree: ast.AST) -> set[str]:
    """Return the names of a file's locks and conditions, including attributes."""
    names = set()
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Assign, ast.AnnAssign)) or node.value is None:
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if any(getattr(part, "attr", getattr(part, "id", "")) in LOCKS for part in ast.walk(node.value)):
            names |= {ast.unparse(target).rpartition(".")[2] for target in targets}
    return names


def blocking_calls(file: Path) -> Iterator[tuple[str, str]]:
    """Yield (function, call) for each blocking call of a file; the class precedes the name of a method.

    A `with` block of a lock is a blocking call as well, printed as `with` and the lock.
    """
    tree = parsed(file)
    lock_names = locks(tree)

    def visit(node: ast.AST, scope: tuple[str, ...]) -> Iterator[tuple[str, str]]:
        for child in ast.iter_child_nodes(node):
            inner = scope
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                inner = (*scope, child.name)
            if isinstance(child, ast.Call):
                function = child.func
                receiver = function.value if isinstance(function, ast.Attribute) else None
                name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
                if waits(name, receiver, child):
                    yield ".".join(scope) or "(module)", ast.unparse(function)
            for item in child.items if isinstance(child, ast.With) else ():
                text = ast.unparse(item.context_expr)
                if text.rpartition(".")[2] in lock_names:
                    yield ".".join(scope) or "(module)", f"with {text}"
            yield from visit(child, inner)

    yield from visit(tree, ())


@functools.cache
def calls_of_source() -> Counter[tuple[str, str, str]]:
    """Count the blocking calls of the source by file, function and call, independent of line numbers."""
    return Counter((str(file.relative_to(ROOT)), *entry) for file in trees() for entry in blocking_calls(file))


def listed() -> dict[tuple[str, str, str], str]:
    """Return the event that ends each call, as listed in the table."""
    rows = [line.strip().strip("|").split("|") for line in TABLE.read_text().splitlines() if line.startswith("| `")]
    return {(cells[0].strip(" `"), cells[1].strip(" `"), cells[2].strip(" `")): cells[3].strip() for cells in rows}


def test_each_blocking_call_is_listed_with_the_event_that_ends_it() -> None:
    missing = sorted(calls_of_source().keys() - listed().keys())
    rows = "\n".join(f"| `{file}` | `{function}` | `{call}` | ? |" for file, function, call in missing)
    assert not missing, (
        "these calls may wait for ever. Say in docs/waits.md what ends each: the generation, the death of a peer, a "
        f"request to stop, or a stated limit; change the code if nothing does. Rows to add:\n{rows}"
    )


def test_the_table_lists_no_outdated_call() -> None:
    outdated = sorted(listed().keys() - calls_of_source().keys())
    assert not outdated, "delete these rows from docs/waits.md, or correct their names:\n" + "\n".join(
        map(str, outdated)
    )


def test_each_row_names_the_event_that_ends_the_wait() -> None:
    kinds = {line.split("**")[1] for line in TABLE.read_text().splitlines() if line.startswith("- **")}
    for entry, ends in listed().items():
        assert re.split("[:;]", ends)[0].strip() in kinds, f"{entry}: {ends!r} begins with none of {sorted(kinds)}"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("def f(s):\n    s.store.wait(['a'])", [("f", "s.store.wait")]),
        ("class A:\n    def g(self):\n        self.thread.join()", [("A.g", "self.thread.join")]),
        ("def f(p):\n    p.join(max(0.0, 1))", [("f", "p.join")]),
        ("def f(q):\n    return queue.get(), {}.get(1), ', '.join(q), os.path.join(q)", [("f", "queue.get")]),
        ("import time\ntime.sleep(1)", [("(module)", "time.sleep")]),
        ("def f(c, w):\n    c.send(1)\n    stdin.write(2)\n    w.write(3)", [("f", "c.send"), ("f", "stdin.write")]),
        (
            "class A:\n    busy: Lock = field(default_factory=threading.Lock)\n    def g(self, a):\n"
            "        with a.b.busy, open(a):\n            pass",
            [("A.g", "with a.b.busy")],
        ),
        (
            "class A:\n    def f(self):\n        self._news = threading.Condition()\n    def g(self):\n"
            "        with self._news:\n            self._news.acquire()",
            [("A.g", "with self._news"), ("A.g", "self._news.acquire")],
        ),
    ],
)
def test_blocking_calls_are_recognised(source: str, expected: list[tuple[str, str]], tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(source)
    assert list(blocking_calls(tmp_path / "a.py")) == expected
