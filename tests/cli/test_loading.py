from __future__ import annotations

import gc
import io
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from remtta.cli import classifiers
from remtta.cli.classifiers import import_uncollected, load_torch
from remtta.cli.progress import heartbeat, progress
from remtta.errors import UsageError
from remtta.options import ModelOptions
from remtta.runs.place import Place
from remtta.runs.summary import RunSummary


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


def test_slow_imports_are_announced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "remtta")
    imported: list[str] = []
    monkeypatch.setattr(classifiers, "import_uncollected", imported.append)
    load_torch("some.module", ModelOptions("vit_tiny_patch16_224"))
    assert caplog.text == "" and imported == ["some.module"]  # torch is there
    monkeypatch.delitem(sys.modules, "torch")
    load_torch("some.module", ModelOptions())
    (tmp_path / "delta.safetensors").touch()
    load_torch("some.module", ModelOptions(), tmp_path)
    told = ["loading torch and vit_base_patch16_224 ...", f"loading torch and the model of {tmp_path} ..."]
    assert caplog.messages == told and len(imported) == 3
    for model, delta in ((ModelOptions(checkpoint="no.pth"), None), (ModelOptions(), tmp_path / "no.safetensors")):
        with pytest.raises(UsageError, match=r"no such (checkpoint|delta) file"):
            load_torch("some.module", model, delta)
    assert len(imported) == 3


WRONG = """
adapt nowhere
adapt . --output .
adapt a.png --mask-ratios 0,10
adapt a.png --checkpoint no.pth
adapt a.png --delta no.safetensors
eval nowhere
eval . --checkpoint no.pth
apply nowhere --output x.safetensors
export nowhere --format onnx --output x
doctor nowhere
bench --methods nothing
text-embed --model vit_base_patch16_224 --output x.safetensors
"""


def test_wrong_use_is_reported_without_torch(tmp_path: Path) -> None:
    (tmp_path / "a.png").touch()
    code = (
        "import sys\nfrom remtta.cli import main\n"
        f"for line in {WRONG.strip().splitlines()!r}:\n"
        "    sys.argv = ['remtta', *line.split()]\n"
        "    try: main()\n"
        "    except SystemExit as end: print(end.code, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["2 False"] * 12, done.stderr


def test_a_heartbeat_repeats_what_is_being_done(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "remtta")
    with heartbeat("loading", every_s=0.01) as tell:
        tell("drawing")
        deadline = time.monotonic() + 10
        while caplog.messages.count("drawing") < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
    assert caplog.messages[0] == "loading" and caplog.messages.count("drawing") >= 2


@pytest.mark.parametrize(("total", "told"), [(None, "7 frames, of how many is not known"), (20, "7/20")])
def test_a_bar_says_whether_it_knows_how_many_there_will_be(
    total: int | None, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setitem(os.environ, "COLUMNS", "200")
    monkeypatch.setitem(os.environ, "TERM", "xterm")
    with progress(total, hidden=False) as advance:
        advance(RunSummary(tmp_path, Place(frames=7)))
    assert told in terminal.getvalue()
