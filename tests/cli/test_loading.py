import subprocess
import sys
from pathlib import Path

import pytest

from remtta.cli import running
from remtta.cli.running import load_torch
from remtta.errors import UsageError
from remtta.options import ModelOptions
from tests.runs.tiny import adapt_tiny


def test_slow_imports_are_announced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "remtta")
    imported: list[str] = []
    monkeypatch.setattr(running, "import_uncollected", imported.append)
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


WITHOUT_TORCH = """
0 --help
0 methods rem
0 inspect run
2 adapt nowhere
2 adapt . --output .
2 adapt a.png --mask-ratios 0,10
2 adapt a.png --checkpoint no.pth
2 adapt a.png --delta no.safetensors
2 eval nowhere
2 eval . --checkpoint no.pth
2 apply nowhere --output x.safetensors
2 export nowhere --format onnx --output x
2 doctor nowhere
2 bench --methods nothing
2 text-embed --model vit_base_patch16_224 --output x.safetensors
"""


def test_help_inspection_and_wrong_use_are_quick(frames: Path, tmp_path: Path) -> None:
    """Without torch; and `--help` without NumPy, OpenCV and Pillow, too."""
    (tmp_path / "a.png").touch()
    adapt_tiny(frames, tmp_path / "run", "source")
    code = (
        "import sys\nfrom remtta.cli import main\nheavy = {'torch', 'numpy', 'cv2', 'PIL'}\n"
        f"for line in {WITHOUT_TORCH.strip().splitlines()!r}:\n"
        "    sys.argv = ['remtta', *line.split()[1:]]\n"
        "    try: main()\n"
        "    except SystemExit as end: print('\\nend', end.code or 0, *heavy & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    ends = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("end")]
    assert [end[0] for end in ends] == [line.split()[0] for line in WITHOUT_TORCH.strip().splitlines()], done.stderr
    assert ends[0] == ["0"] and not any("torch" in end for end in ends)
