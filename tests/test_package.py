"""What the package says of itself."""

from pathlib import Path

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
