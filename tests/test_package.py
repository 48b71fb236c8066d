"""Sizes and names that keep the code easy to read, and what the package says of itself."""

import ast
from collections.abc import Iterator
from pathlib import Path

import remtta


def test_every_public_name_can_be_imported_and_is_documented() -> None:
    for name in remtta.__all__:
        public = getattr(remtta, name)
        assert isinstance(public, str) or public.__doc__
    assert dir(remtta) == sorted(remtta.__all__) == sorted([*vars(remtta)["_HOMES"], "RemttaError", "__version__"])
    page = (ROOT / "docs/api.rst").read_text()
    assert all(f"``{name}``" in page for name in remtta.__all__ if name != "__version__")


def test_the_changelog_names_the_version() -> None:
    changelog = Path(__file__).parent.parent / "CHANGELOG.md"
    assert f"## [{remtta.__version__}]" in changelog.read_text()


ROOT = Path(__file__).parent.parent
MAX_LINES = {"file": 350, "class": 200, "command": 60}


def sizes() -> Iterator[tuple[str, str, int]]:
    """Kind, name and number of lines of every file and class, and of every function of a command."""
    for path in sorted((ROOT / "remtta").rglob("*.py")):
        text, name = path.read_text(encoding="utf-8"), path.relative_to(ROOT).as_posix()
        yield "file", name, text.count("\n")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                yield "class", f"{name}: {node.name}", num_lines(node)
            elif isinstance(node, ast.FunctionDef) and name.startswith("remtta/cli/"):
                yield "command", f"{name}: {node.name}", num_lines(node)


def num_lines(node: ast.ClassDef | ast.FunctionDef) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def test_nothing_is_too_long() -> None:
    found = list(sizes())
    assert {kind for kind, *_ in found} == set(MAX_LINES)
    assert [each for each in found if each[2] > MAX_LINES[each[0]]] == []
