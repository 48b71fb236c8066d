"""remtta delta: compare, mix and keep deltas, from one command to the next."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from remtta import load_delta
from tests.command import refusal_of, remtta_here
from tests.conftest import draw_folder
from tests.runs.tiny import adapt_tiny


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two runs of one model on different frames, 6 and 3 of them."""
    folder = tmp_path_factory.mktemp("fleet")
    for name, seeds in (("cam1", range(6)), ("cam2", range(6, 9))):
        adapt_tiny(draw_folder(folder / f"{name}_frames", seeds), folder / name, "tent")
    return [folder / "cam1", folder / "cam2"]


def test_a_fleets_deltas_are_averaged_scaled_kept_and_told(
    runs: list[Path], tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert remtta_here("delta", "average", *runs, "-o", "site.safetensors") == 0
    assert capfd.readouterr().err == "site.safetensors: mean of 2 deltas with weights 0.667, 0.333 (9 frames)\n"
    first, second, mean = (load_delta(path) for path in (*runs, Path("site.safetensors")))
    for name, tensor in mean.tensors.items():
        torch.testing.assert_close(tensor, (2 * first.tensors[name] + second.tensors[name]) / 3)
    assert remtta_here("delta", "scale", "site.safetensors", "0.5", "-o", "half.safetensors") == 0
    assert remtta_here("delta", "diff", "site.safetensors", "half.safetensors", "--json") == 0
    layers = json.loads(capfd.readouterr().out)["layers"]
    assert layers[0]["cosine"] == pytest.approx(1) and layers[0]["distance"] == pytest.approx(layers[0]["rms"][1])
    assert remtta_here("delta", "diff", *runs) == 0
    assert "\nblocks.0.norm1  " in capfd.readouterr().out

    for pushed in ("site.safetensors", "half.safetensors", "site/cam@1"):
        assert remtta_here("delta", "push", pushed, "site/cam", "-q") == 0
    assert remtta_here("delta", "pull", "site/cam@2", "-o", "got.safetensors") == 0
    assert Path("got.safetensors").read_bytes() == Path("half.safetensors").read_bytes()
    assert capfd.readouterr().err == "got.safetensors: version 2\n"
    assert remtta_here("delta", "log", "site/cam") == 0
    lines = capfd.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["@3", "@2", "@1"]
    assert lines[1].endswith(f"; scale; from {str(mean.file_sha256)[:12]}")
    assert remtta_here("delta", "log", "site/cam", "--json") == 0
    assert json.loads(capfd.readouterr().out)["versions"][2]["lineage"]["made_by"] == "average"
    assert remtta_here("inspect", "site.safetensors") == 0
    told = capfd.readouterr().out
    assert "lineage      average\nfrom         " in told and f"{runs[0]}_frames, weight 0.667\n" in told
    assert remtta_here("inspect", runs[0]) == 0
    assert f"lineage      adapt {runs[0]}_frames (folder), run " in capfd.readouterr().out


@pytest.mark.parametrize(
    ("args", "code", "text"),
    [
        (["average", "cam1", "-o", "x.safetensors"], 2, "two deltas or more"),
        (["average", "cam1", "cam2", "-o", "x.pth"], 2, "must end in .safetensors"),
        (["scale", "cam1", "0", "-o", "x.safetensors"], 2, "the factor must be > 0"),
        (["diff", "cam1", "nowhere"], 2, "nowhere: no such delta file"),
        (["pull", "cam1", "-o", "x.safetensors"], 2, "cam1 holds no versions of a delta"),
        (["push", "cam1", "cam1/run.json"], 2, "cannot be a folder of deltas"),
    ],
)
def test_bad_input_is_told(
    args: list[str],
    code: int,
    text: str,
    runs: list[Path],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(runs[0].parent)
    exit_code, told = refusal_of(capfd, "delta", *args)
    assert exit_code == code and text in told
    assert not Path("x.safetensors").exists()
