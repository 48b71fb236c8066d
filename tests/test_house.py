"""The sizes that keep every file, class and command short enough to be read at once."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
MOST_LINES_OF_FILE = 350
MOST_LINES_OF_CLASS = 200
MOST_ATTRIBUTES = 12
MOST_LINES_OF_COMMAND = 60


def files(folder: str = "remtta") -> Iterator[tuple[str, str]]:
    """Path below the project, and content, of every Python file."""
    for path in sorted((ROOT / folder).rglob("*.py")):
        yield path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")


def num_lines(node: ast.ClassDef | ast.FunctionDef) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def classes() -> Iterator[tuple[str, ast.ClassDef]]:
    for path, text in files():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                yield f"{path}: {node.name}", node


def attributes(node: ast.ClassDef) -> set[str]:
    """Names that the methods set on self; the fields of a dataclass are none, as its methods do not set them."""
    found = (part for part in ast.walk(node) if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store))
    return {part.attr for part in found if isinstance(part.value, ast.Name) and part.value.id == "self"}


def test_no_file_is_too_long() -> None:
    sizes = {path: text.count("\n") for path, text in files()}
    assert {path: size for path, size in sizes.items() if size > MOST_LINES_OF_FILE} == {}


def test_no_class_is_too_long() -> None:
    sizes = {name: num_lines(node) for name, node in classes()}
    assert {name: size for name, size in sizes.items() if size > MOST_LINES_OF_CLASS} == {}


def test_no_object_holds_too_much() -> None:
    held = {name: attributes(node) for name, node in classes()}
    assert {name: sorted(names) for name, names in held.items() if len(names) > MOST_ATTRIBUTES} == {}


def test_no_command_does_its_work_itself() -> None:
    sizes = {
        f"{path}: {node.name}": num_lines(node)
        for path, text in files("remtta/cli")
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef)
    }
    assert {name: size for name, size in sizes.items() if size > MOST_LINES_OF_COMMAND} == {}
