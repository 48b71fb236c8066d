"""Exports are loaded by the programs they are for, and answer as the adapted model does."""

import json
import shutil
import signal
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import timm
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from timm.models import save_for_hf
from torch import Tensor, nn

from remtta import Delta, apply_delta, load_delta, load_model, save_delta
from remtta.backbones.norms import norm_modules
from remtta.errors import OutputError, RemttaError, UsageError
from remtta.files import check_not_input
from remtta.formats.export import ExportableModel, export_model, save_onnx, write_timm
from remtta.models.info import labels_of, model_info
from remtta.models.tensor_files import state_sha256
from remtta.options import ModelOptions
from remtta.zero_shot.classifier import ZeroShotHead
from tests.command import Started, dies_while_it_exports, refusal_of, remtta_here
from tests.conftest import NUM_CLASSES, TINY, raising, random_images, tiny_vit

NAME = "vit_tiny_patch16_224"
LABELS = ["<b>", *"bcdefg"]
EXTERNAL = pytest.mark.filterwarnings("ignore")  # what other programs warn of, of their own making


def delta_at(path: Path, seed: int, **more: Tensor) -> Path:
    """A delta of all norms of `tiny_vit()`, and of more tensors."""
    model = tiny_vit()
    generator = torch.Generator().manual_seed(seed)
    names = [f"{layer}.{part}" for layer in norm_modules(model) for part in ("weight", "bias")]
    tensors = {name: 0.2 * torch.randn(48, generator=generator) for name in names}
    options = {"num_classes": NUM_CLASSES, "model_kwargs": TINY, "checkpoint": "tiny.safetensors"}
    named = {name.replace("__", "."): tensor for name, tensor in more.items()}
    delta = Delta({**tensors, **named}, NAME, state_sha256(model), "rem", frames=5, updates=1, model_options=options)
    save_delta(path, delta)
    return path


def adapted(delta: Path) -> nn.Module:
    model = tiny_vit()
    apply_delta(model, load_delta(delta))
    return model


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint, labels, and two deltas; the first one is exported to ONNX."""
    folder = tmp_path_factory.mktemp("exported")
    save_file(tiny_vit().state_dict(), folder / "tiny.safetensors")
    (folder / "labels.txt").write_text("\n".join(LABELS))
    delta_at(folder / "1.safetensors", 1)
    delta_at(folder / "2.safetensors", 2, head__bias=torch.linspace(-1, 1, NUM_CLASSES))  # of centered logits
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert run(folder, "1", "onnx", "--labels", folder / "labels.txt") == 0
    return folder


def run(place: Path, delta: str, form: str, *more: str | Path) -> int:
    options: list[str | Path] = ["--format", form, "-o", place / f"{delta}_{form}"]
    options += ["--checkpoint", place / "tiny.safetensors"]
    return remtta_here("export", place / f"{delta}.safetensors", *options, *more)


def check_onnx(path: Path, model: nn.Module) -> None:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    for count in (1, 3, 7):
        images = random_images(count, seed=count)
        with torch.inference_mode():
            expected = model(images).numpy()
        np.testing.assert_allclose(session.run(None, {"images": images.numpy()})[0], expected, atol=1e-4)


@EXTERNAL
def test_onnx_answers_as_torch_does_at_any_batch_and_says_what_it_is(place: Path) -> None:
    path, delta = place / "1_onnx" / "model.onnx", place / "1.safetensors"
    assert [file.name for file in path.parent.iterdir()] == ["model.onnx"]
    check_onnx(path, adapted(delta))
    told = {entry.key: entry.value for entry in onnx.load(str(path)).metadata_props}
    assert told["base_sha256"] == state_sha256(tiny_vit()) and told["state_sha256"] == state_sha256(adapted(delta))
    assert told["delta_sha256"] == load_delta(delta).file_sha256
    assert json.loads(told["labels"]) == LABELS and json.loads(told["preprocessing"])["input_size"] == [32, 32]


@EXTERNAL
def test_attention_with_a_bias_and_a_head_of_text_embeddings_go_to_onnx(place: Path, tmp_path: Path) -> None:
    model = timm.create_model("beit_base_patch16_224", num_classes=NUM_CLASSES, **{**TINY, "depth": 1}).eval()
    texts: Any = SimpleNamespace(sha256=bytes(32))
    embeddings = random_images(NUM_CLASSES, size=4).flatten(1)
    model.head = ZeroShotHead(nn.Identity(), embeddings, torch.tensor(10.0), torch.tensor(-2.0), texts)
    save_onnx(
        ExportableModel(model, {}, model_info(model), load_delta(place / "1.safetensors"), ()), tmp_path / "model.onnx"
    )
    check_onnx(tmp_path / "model.onnx", model)


def test_logits_that_are_not_numbers_are_refused(place: Path) -> None:
    model = ExportableModel(tiny_vit(), {}, model_info(tiny_vit()), load_delta(place / "1.safetensors"), ())
    with pytest.raises(RemttaError, match="in x the logits differ from torch's by nan"):
        model.check("x", lambda images: np.full((len(images), NUM_CLASSES), np.nan))


@EXTERNAL
def test_peft_loads_the_adapter_on_the_base_to_the_same_logits(place: Path) -> None:
    import peft

    for delta in ("1", "2"):
        assert run(place, delta, "peft") == 0
        base = load_model(NAME, checkpoint=place / "tiny.safetensors", num_classes=NUM_CLASSES, model_kwargs=TINY)
        tuned = peft.PeftModel.from_pretrained(base, str(place / f"{delta}_peft")).eval()
        with torch.inference_mode():
            assert torch.equal(tuned(random_images(3)), adapted(place / f"{delta}.safetensors")(random_images(3)))
    assert (place / "1_peft" / "adapter_model.safetensors").stat().st_size < 20_000


def test_peft_is_refused_for_other_weights_than_norms_and_head(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    delta = delta_at(place / "stem.safetensors", 1, patch_embed__proj__bias=torch.ones(48))
    options: list[str | Path] = ["--format", "peft", "-o", place / "no", "--checkpoint", place / "tiny.safetensors"]
    assert refusal_of(capfd, "export", delta, *options).startswith(
        "Error: the delta changes patch_embed.proj (1 layers"
    )


@EXTERNAL
def test_timm_and_remtta_load_the_folder(place: Path) -> None:
    assert run(place, "1", "timm", "--labels", place / "labels.txt") == 0
    name = f"local-dir:{place / '1_timm'}"
    expected = state_sha256(adapted(place / "1.safetensors"))
    assert state_sha256(timm.create_model(name, pretrained=True)) == expected
    model = load_model(name)
    assert state_sha256(model) == expected and labels_of(model) == LABELS
    assert str(place) not in (place / "1_timm" / "config.json").read_text()
    assert len({path.stat().st_mode for path in (place / "1_timm").iterdir() if path.name[0] != "."}) == 1


@EXTERNAL
def test_weights_that_layers_share_go_to_a_timm_folder(place: Path, tmp_path: Path) -> None:
    model: Any = tiny_vit()
    model.blocks[0].norm1 = model.blocks[0].norm2
    write_timm(ExportableModel(model, {}, model_info(model), load_delta(place / "1.safetensors"), ()), tmp_path)
    assert state_sha256(timm.create_model(f"local-dir:{tmp_path}", pretrained=True)) == state_sha256(model)


def test_an_export_that_is_killed_half_way_leaves_nothing_that_looks_whole(place: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text("of an earlier one")
    options: list[str | Path] = ["--format", "timm", "-o", tmp_path / "out", "--checkpoint", place / "tiny.safetensors"]
    command = ["export", place / "1.safetensors", *options, "--overwrite"]
    with Started(*command, before=dies_while_it_exports) as process:
        process.communicate(timeout=120)
        assert process.returncode == -signal.SIGKILL
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"config.json", ".export", ".lock"}
    assert (tmp_path / "out" / "config.json").read_text() == "of an earlier one"
    assert remtta_here(*command) == 0
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"config.json", "model.safetensors"}


def test_what_is_there_stays_and_what_is_missing_is_reported(
    place: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(place / "1_onnx", tmp_path / "out")
    before = (tmp_path / "out" / "model.onnx").read_bytes()
    options: list[str | Path] = ["-o", tmp_path / "out", "--checkpoint", place / "tiny.safetensors"]
    delta = place / "2.safetensors"
    assert "exists; choose another --output" in refusal_of(capfd, "export", delta, "-f", "onnx", *options)
    for package in ("onnx", "peft"):
        monkeypatch.setitem(sys.modules, package, None)
        line = refusal_of(capfd, "export", delta, "-f", package, *options, "-o", tmp_path / "new")
        assert f'{package}, which is not installed: pip install "onnx>=' in line
    assert not (tmp_path / "new").exists()
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.onnx"]
    assert (tmp_path / "out" / "model.onnx").read_bytes() == before


def test_the_weights_that_an_export_is_made_of_are_not_replaced(
    place: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    base = tmp_path / "base" / "model.safetensors"
    save_for_hf(tiny_vit(), str(base.parent), safe_serialization=True)
    before, delta = base.read_bytes(), place / "1.safetensors"
    options: list[str | Path] = ["-f", "timm", "-o", base.parent, "--checkpoint", base, "--overwrite"]
    assert f"would replace its own input {base}; choose another" in refusal_of(capfd, "export", delta, *options)
    assert base.read_bytes() == before
    with pytest.raises(UsageError, match=f"would replace its own input {base.parent}; choose another"):
        check_not_input(base, "--output", [ModelOptions(f"local-dir:{base.parent}").weights_place])


def test_a_full_disk_is_named_with_the_folder(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
    monkeypatch.setattr("remtta.formats.export.save_weights", raising(full))
    model = ExportableModel(tiny_vit(), {}, model_info(tiny_vit()), load_delta(place / "1.safetensors"), ())
    with pytest.raises(OutputError, match=r"out cannot be written: .*No space left"):
        export_model(model, "timm", tmp_path / "out")
