"""The house stays as it was built: no circle of files, one name one class, few files in a step."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import grimp

import ebbtide

SOURCE = Path(ebbtide.__file__).parent


def _classes() -> dict[str, list[str]]:
    found = defaultdict(list)
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(str(path.relative_to(SOURCE)))
    return found


def test_no_two_classes_have_one_name() -> None:
    twice = {name: where for name, where in _classes().items() if len(where) > 1}
    assert not twice


def test_no_two_files_have_one_name() -> None:
    found = defaultdict(list)
    for path in sorted(SOURCE.rglob("*.py")):
        if path.name != "__init__.py":
            found[path.stem].append(str(path.relative_to(SOURCE)))
    twice = {name: where for name, where in found.items() if len(where) > 1}
    assert not twice


def test_there_is_no_circle_of_files() -> None:
    graph = grimp.build_graph("ebbtide", exclude_type_checking_imports=False, cache_dir=None)
    left = {one: set(graph.find_modules_directly_imported_by(one)) for one in graph.modules}
    while done := [one for one, others in left.items() if not others & left.keys()]:
        for one in done:
            del left[one]
    assert not left, f"these import each other, or are imported by such: {sorted(left)}"


def test_warnings_are_of_one_class() -> None:
    """A user silences, or raises, all of them by `EbbtideWarning`."""
    beside = [
        str(path.relative_to(SOURCE))
        for path in sorted(SOURCE.rglob("*.py"))
        if path.name != "errors.py" and "warnings.warn(" in path.read_text()
    ]
    assert not beside, f"these warn by themselves: errors.warn_user does it: {beside}"


FACTORIES = {"empty", "zeros", "ones", "full", "tensor", "arange", "empty_strided", "linspace"}
WITHIN = ("checkpoint", "engine", "kernels", "memory", "runtime", "tracing")
"""What runs in the user's process, in whatever it has set."""


def test_every_tensor_of_ours_names_its_device() -> None:
    """Else it is made on the user's `torch.set_default_device(...)`."""
    beside = [
        f"{path.relative_to(SOURCE)}:{node.lineno}"
        for room in WITHIN
        for path in sorted((SOURCE / room).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and ast.unparse(node.func.value) == "torch"
        and node.func.attr in FACTORIES
        and not any(keyword.arg in ("device", None) for keyword in node.keywords)
    ]
    assert not beside, f"these make a tensor on the default device: {beside}"
