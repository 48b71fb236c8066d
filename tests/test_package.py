"""What the package says of itself."""

import sys
from importlib import import_module
from pathlib import Path

import pytest

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
    assert f"## [{remtta.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


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
