"""What the changelog promises of runs, states and deltas of the released version 0.5.0.

`tests/data/0.5.0` has runs that its code made of `adapt_tiny` with `model()`, `RUNS` and `topk=1` on the images of
`frames`, stopped after two of four batches; only the names of the machine in `run.json` were replaced.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from remtta import REMConfig, load_delta
from remtta.deltas import DELTA
from remtta.errors import UsageError
from remtta.methods.settings.base import MethodConfig
from remtta.methods.table import method_config
from remtta.methods.tent import TentConfig
from remtta.options import GuardOptions
from remtta.runs.folder import PREDICTIONS, STATE
from tests.command import remtta_here
from tests.conftest import NUM_CLASSES, draw_folder, same_tensors
from tests.records import record_of, rows_of
from tests.runs.tiny import GUARD, adapt_tiny

DATA = Path(__file__).parents[1] / "data" / "0.5.0"
RUNS: dict[str, tuple[MethodConfig, GuardOptions | None]] = {
    "rem": (REMConfig(lr=0.01), GUARD),
    "tent": (TentConfig(lr=0.01), None),
    "remtta": (method_config("remtta", {}, batch_size=3), GUARD),
    "fast": (method_config("fast", {}, batch_size=3), None),
}
SIZES: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 12, "depth": 2, "num_heads": 3}


def model() -> nn.Module:
    """A small ViT whose weights are the same on every machine: multiples of 1/256."""
    vit = timm.create_model("vit_tiny_patch16_224", pretrained=False, num_classes=NUM_CLASSES, **SIZES)
    with torch.no_grad():
        for number, parameter in enumerate(vit.parameters()):
            values = (torch.arange(parameter.numel()) * 7919 + number * 104729) % 257 - 128
            parameter.copy_(values.view_as(parameter) / 256)
    return vit.eval()


def go(method: str, folder: str, *, resume: bool = False) -> Any:
    config, guard = RUNS[method]
    options = {"guard": guard, "topk": 1}
    return adapt_tiny("frames", Path(folder), method, model=model(), resume=resume, config=config, options=options)


@pytest.fixture(autouse=True)
def frames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The images, by the relative path that the stored rows have."""
    monkeypatch.chdir(tmp_path)
    return draw_folder(Path("frames"), range(12), "frame_{}.png")


@pytest.mark.parametrize("method", ["rem", "tent"])
def test_a_run_without_centered_logits_is_resumed(method: str) -> None:
    shutil.copytree(DATA / method, "run")
    begun = Path("run", PREDICTIONS).read_bytes()
    assert go(method, "run", resume=True).exit_reason == "completed"
    assert Path("run", PREDICTIONS).read_bytes().startswith(begun) and record_of(Path("run"))["resumed"] == 1
    go(method, "whole")
    rows, whole = rows_of(Path("run")), rows_of(Path("whole"))
    assert [(row["class"], row["update"]) for row in rows] == [(row["class"], row["update"]) for row in whole]
    if method == "tent":  # an ensemble's temperature, which 0.5.0 did not have, begins with the second part
        assert [row["prob"] for row in rows] == pytest.approx([row["prob"] for row in whole], abs=1e-5)
    # Equal but for the last bits, which are the processor's.
    torch.testing.assert_close(load_delta("run").tensors, load_delta("whole").tensors, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("method", ["rem", "tent"])
def test_a_state_is_read_bit_for_bit(method: str, frames: Path) -> None:
    for number in range(6, 12):
        (frames / f"frame_{number}.png").unlink()  # so that nothing comes after the state, which is saved again
    shutil.copytree(DATA / method, "run")
    assert go(method, "run", resume=True).num_frames == 6
    earlier, now = load_file(DATA / method / STATE), load_file(Path("run", STATE))
    assert now.keys() - earlier.keys() == ({"temperature.log"} if method == "rem" else set())
    assert same_tensors(earlier, {name: now[name] for name in earlier})


@pytest.mark.parametrize(
    ("method", "line"),
    [
        ("remtta", "--resume needs the settings the run began with: .*mask_ratios was .*"),
        ("fast", "the state in run was written by another version of remtta; start again with --overwrite"),
    ],
)
def test_a_run_with_centered_logits_is_refused_in_one_line(method: str, line: str) -> None:
    shutil.copytree(DATA / method, "run")
    with pytest.raises(UsageError, match=f"^{line}$"):
        go(method, "run", resume=True)
    for path in (DATA / method).iterdir():
        assert Path("run", path.name).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("method", ["rem", "tent", "remtta"])
def test_a_delta_can_be_used(method: str) -> None:
    source = model().state_dict()
    save_file(source, "model.safetensors")
    sizes = [part for name, value in SIZES.items() for part in ("--model-kwargs", f"{name}={value}")]
    named = ["--model", "vit_tiny_patch16_224", *sizes, "--num-classes", "7", "--checkpoint", "model.safetensors"]
    assert remtta_here("apply", DATA / method / DELTA, *named, "--output", "adapted.safetensors", "--quiet") == 0
    delta, adapted = load_delta(DATA / method), load_file("adapted.safetensors")
    assert (delta.updates, delta.frames) == (2, 6) and any(change.any() for change in delta.tensors.values())
    expected = {name: source[name] + delta.tensors[name] if name in delta.tensors else source[name] for name in source}
    assert same_tensors(adapted, expected)
