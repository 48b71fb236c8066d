from __future__ import annotations

from pathlib import Path

import remtta


def test_every_public_name_can_be_imported_and_is_documented() -> None:
    for name in remtta.__all__:
        public = getattr(remtta, name)
        assert isinstance(public, str) or public.__doc__
    assert dir(remtta) == sorted(remtta.__all__)


def test_the_changelog_names_the_version() -> None:
    changelog = Path(__file__).parent.parent / "CHANGELOG.md"
    assert f"## [{remtta.__version__}]" in changelog.read_text()
