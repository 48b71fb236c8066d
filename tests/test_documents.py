"""The documents point to things that exist: links, headings, files, modules, and options of the commands they show."""

import pkgutil
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
import typer

from remtta.extensions import Point
from tests.test_options_page import COMMANDS, ELSEWHERE, KNOWN, MAIN, OPTION

ROOT = Path(__file__).parent.parent
PAGES = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
# Of podman, docker, uv, jq and tritonserver.
OTHERS = {
    "--model-repository",
    "--model-control-mode",
    "--build",
    "--cpus",
    "--from",
    "--no-healthcheck",
    "--read-only",
    "--resolution",
    "--tmpfs",
    "--unbuffered",
}
TEXTS = {page: page.read_text() for page in PAGES}


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```$|^    .*?$", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(text: str) -> set[str]:
    """The headings of a page as links name them: small letters, hyphens for blanks, no other signs."""
    headings = re.findall(r"^#+ (.*)$", without_code(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def leads_somewhere(page: Path, target: str) -> bool:
    path, _, anchor = target.partition("#")
    place = (page.parent / path) if path else page
    return place.exists() and (not anchor or anchor in anchors(place.read_text()))


def test_every_relative_link_leads_somewhere() -> None:
    links = [
        (page, target)
        for page, text in TEXTS.items()
        for target in re.findall(r"\]\(([^)\s]+)\)", without_code(text))
        if not re.match(r"https?://", target)
    ]
    assert len(links) > 50
    assert [(page.name, target) for page, target in links if not leads_somewhere(page, target)] == []


def test_the_files_and_modules_they_name_are_there() -> None:
    for page, text in TEXTS.items():
        for path in re.findall(r"(?<![\w/.:])(?:remtta|examples|tests|docs)/(?:[\w.-]+/?)+", text):
            assert (ROOT / path.rstrip(".")).exists(), (page, path)
        text = re.sub(rf"\bremtta\.(service|{'|'.join(get_args(Point))})\b(?!\.)", "", text)  # no modules
        for name in re.findall(r"(?<![\w/.@-])remtta(?:\.[A-Za-z_]\w*)+", text):
            pkgutil.resolve_name(name)


def commands(text: str) -> Iterator[list[str]]:
    """Words of every command of remtta in the examples, from its name to the end of its part of a pipeline."""
    for line in text.replace("\\\n", " ").splitlines():
        if line.startswith("    "):
            lexer = shlex.shlex(line, posix=True, punctuation_chars="|&>")
            lexer.whitespace_split = True
            words = list(lexer)
            for start, word in enumerate(words[:-1]):
                if word == "remtta" and words[start + 1] in MAIN.commands:
                    ends = (position for position in range(start, len(words)) if set(words[position]) <= set("|&>"))
                    yield words[start + 1 : next(ends, None)]


def test_the_commands_they_show_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text("lr: 5e-4\n")
    for page, text in TEXTS.items():
        for command, *words in commands(text):
            assert is_taken(command, words), (page, command, words)


def is_taken(command: str, words: list[str]) -> bool:
    """Return whether the command line accepts these options and arguments; nothing is run.

    Raises:
        Exception: Saying what it refuses.
    """
    try:
        COMMANDS[command].make_context(command, list(words))
    except typer.Exit as end:  # --help
        return end.exit_code == 0
    return True


def test_every_option_they_name_is_one_of_a_command_or_of_an_example() -> None:
    known = ELSEWHERE | KNOWN | OTHERS
    known.update(*(OPTION.findall(path.read_text()) for path in (ROOT / "examples").glob("*.py")))
    found = {page.name: set(OPTION.findall(without_removed(text))) - known for page, text in TEXTS.items()}
    assert {name: unknown for name, unknown in found.items() if unknown} == {}


def without_removed(text: str) -> str:
    """A page without what the changelog says was removed, and without its released versions."""
    return re.sub(r"^### Removed$.*?(?=^##)|^## \[\d.*", "", text, flags=re.MULTILINE | re.DOTALL)


def test_every_command_is_shown() -> None:
    assert {command for text in TEXTS.values() for command, *_ in commands(text)} == set(MAIN.commands)


def test_the_readme_lists_every_page() -> None:
    text = TEXTS[ROOT / "README.md"]
    assert [page.name for page in PAGES[1:] if f"]({page.relative_to(ROOT).as_posix()})" not in text] == []
