"""What the package says of itself."""

import re
import sys
from importlib import import_module
from pathlib import Path

import pytest
import yaml

import remtta

ROOT = Path(__file__).parent.parent


def test_every_public_name_can_be_imported_and_is_documented() -> None:
    for name in remtta.__all__:
        public = getattr(remtta, name)
        assert isinstance(public, str) or public.__doc__
    assert dir(remtta) == sorted(remtta.__all__) == sorted([*vars(remtta)["_HOMES"], "RemttaError", "__version__"])
    page = (ROOT / "docs/api.rst").read_text()
    assert all(f"``{name}``" in page for name in remtta.__all__ if name != "__version__")


def test_the_changelog_names_the_version() -> None:
    title = "Unreleased" if ".dev" in remtta.__version__ else remtta.__version__
    assert f"## [{title}]" in (ROOT / "CHANGELOG.md").read_text()


def test_the_citations_of_the_paper_and_the_software_agree() -> None:
    software = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    paper = software["preferred-citation"]
    released = re.findall(r"^## \[(\d.*)\] - (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[0]
    assert (software["version"], str(software["date-released"])) == released
    entries = re.split(r"(?m)^@", (ROOT / "README.md").read_text().partition("```bibtex\n")[2].partition("```")[0])
    fields = [dict(re.findall(r"(\w+) = \{(.*?)\}(?=,|\n)", entry)) for entry in entries[1:]]
    assert fields == [
        {
            "title": paper["title"],
            "author": " and ".join(f"{who['family-names']}, {who['given-names']}" for who in paper["authors"]),
            "booktitle": paper["collection-title"],
            "year": str(paper["year"]),
            "url": paper["url"],
        },
        {
            "title": software["title"],
            "author": f"{{{software['authors'][0]['name']}}}",
            "version": software["version"],
            "year": str(software["date-released"].year),
            "url": software["url"],
            "license": software["license"],
        },
    ]


def test_modules_that_moved_are_found_by_their_old_names(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for old, name in (
        ("remtta.evaluation", "open_dataset"),
        ("remtta.evaluation.domains", "Domain"),
        ("remtta.corruptions", "corrupt"),
        ("remtta.export", "export_model"),
    ):
        monkeypatch.delitem(sys.modules, old, raising=False)
        assert getattr(import_module(old), name).__module__.startswith(("remtta.lab", "remtta.formats"))
        assert f"{old} has moved to remtta." in caplog.text
    with pytest.raises(ImportError):
        import_module("remtta.evaluation.nothing")
