from __future__ import annotations

import gc
import sys
from pathlib import Path

import pytest

from remtta.cli.classifiers import import_uncollected


def test_what_a_run_needs_is_imported_without_the_garbage_collector(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "large_library.py").write_text("import gc\ncollected = gc.isenabled()\n")
    monkeypatch.syspath_prepend(tmp_path)
    gc.unfreeze()  # what `tests.conftest` froze
    try:
        import_uncollected("large_library")
        assert not sys.modules["large_library"].collected
        assert gc.isenabled() and gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
        del sys.modules["large_library"]
    import_uncollected("remtta.errors")  # which is there
    assert gc.get_freeze_count() == 0
    gc.freeze()
