"""Class embeddings in a file, for timm image towers."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import open_clip
import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from timm.layers import QuickGELU
from torch.nn import functional as F

from remtta.deltas.base_model import base_options
from remtta.deltas.delta import Delta, apply_delta, check_base, checkpoint_state, load_delta
from remtta.errors import CheckpointError, DeltaError, ModelError, UsageError
from remtta.formats.export import ExportableModel
from remtta.models.info import labels_of
from remtta.models.loading import load, load_model
from remtta.models.tensor_files import state_sha256
from remtta.options import ModelOptions
from tests.command import refusal_of, remtta_here
from tests.conftest import draw_folder, random_images
from tests.methods.making import pipeline_of, predicted
from tests.zero_shot.tiny_clip import NAMES, tiny_clip

PAGE = Path(__file__).parent.parent.parent / "docs" / "clip.md"
TRUNK = {"timm_model_name": "test_vit", "timm_pool": "token", "timm_proj": "none", "image_size": 160}
KWARGS: dict[str, dict[str, Any]] = {"pooled": {"num_classes": 0}, "projected": {"num_classes": 64, "depth": 2}}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, its embeddings (64 values) of NAMES in a file, its image tower and another one."""
    place = tmp_path_factory.mktemp("texts")
    (place / "names.txt").write_text("\n".join(NAMES))
    name, own = tiny_clip(place / "clip", TRUNK, custom_text=True, embed_dim=64, init_logit_bias=-2.0)
    save_file(own.visual.trunk.state_dict(), place / "pooled.safetensors")
    save_file(timm.create_model("test_vit", **KWARGS["projected"]).state_dict(), place / "projected.safetensors")
    options = ["--model", name, "--labels", str(place / "names.txt"), "--prompts", "openai7", "--device", "cpu"]
    assert remtta_here("text-embed", *options, "--output", str(place / "texts.safetensors")) == 0
    assert remtta_here("text-embed", *options, "--output", str(place / "texts.safetensors")) == 2  # it is there
    return place


def tower(place: Path, kind: str, **more: Any) -> Any:
    given: dict[str, Any] = {"checkpoint": place / f"{kind}.safetensors", **more}
    given.setdefault("model_kwargs", KWARGS[kind])
    return load_model("test_vit", text_embeddings=place / "texts.safetensors", **given)


@pytest.mark.parametrize("kind", ["projected", "pooled"])
@torch.no_grad()
def test_an_image_tower_classifies_by_the_file_and_adapts(place: Path, kind: str) -> None:
    model, texts = tower(place, kind), load_file(place / "texts.safetensors")
    plain: Any = timm.create_model("test_vit", **KWARGS[kind]).eval()
    plain.load_state_dict(load_file(place / f"{kind}.safetensors"))
    written, kept = checkpoint_state(model), plain.state_dict()
    assert written.keys() == kept.keys() and all(torch.equal(written[each], kept[each]) for each in kept)
    images = random_images(4, size=160)
    expected = texts["logit_scale"] * F.normalize(plain(images), dim=-1) @ texts["embeddings"].T + texts["logit_bias"]
    torch.testing.assert_close(pipeline_of("source", model)(images), expected, rtol=0, atol=1e-4)
    if kind == "pooled":  # as the whole model does, with its text tower
        whole = load_model(f"clip:{place / 'clip'}", labels=NAMES, prompts="openai7")
        torch.testing.assert_close(whole(images), expected, rtol=0, atol=1e-4)
    assert texts["logit_bias"] == -2 and texts["embeddings"].shape == (5, 64) and labels_of(model) == NAMES
    assert (place / "texts.safetensors").stat().st_mode == (place / "names.txt").stat().st_mode
    pipeline = pipeline_of("rem", model)
    pipeline(images)
    assert not torch.equal(predicted(pipeline, images), expected) and pipeline.method.num_updates == 1
    pipeline.reset()
    for name in ("watt", "clipartt", "tpt"):
        with pytest.raises(ModelError, match="the method needs a text tower, which --text-embeddings do not include"):
            pipeline_of(name, model)


def test_the_texts_are_part_of_a_deltas_base_and_no_header_names_their_file(
    place: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tower(place, "projected")
    origin = dict(model.pretrained_cfg["built_from"])
    name, checkpoint = origin.pop("name"), origin["checkpoint"]
    assert origin["text_embeddings"] == str(place / "texts.safetensors")
    delta = Delta({}, name, state_sha256(model), "rem", model_options=origin, path="d")
    given = ModelOptions(name, checkpoint, model_kwargs=KWARGS["projected"])
    with pytest.raises(UsageError, match="name it with --text-embeddings"):
        base_options(delta, given)
    wanted = base_options(delta, replace(given, own={"text_embeddings": place / "texts.safetensors"}))
    assert state_sha256(load(wanted)) == delta.base_sha256
    with pytest.raises(DeltaError, match="with the same text embeddings, input size and model arguments"):
        check_base(delta, "of other embeddings")
    frames, run = draw_folder(tmp_path / "frames", range(4)), tmp_path / "run"
    options = ["--model", "test_vit", "--checkpoint", checkpoint, "--model-kwargs", "num_classes=64", "depth=2"]
    options += ["--text-embeddings", str(place / "texts.safetensors"), "--quiet"]
    assert remtta_here("adapt", frames, *options, "--device", "cpu", "--batch-size", "2", "--output", run) == 0
    whole = tmp_path / "adapted.safetensors"
    assert remtta_here("apply", str(run), *options[:-1], "--output", str(whole)) == 0
    assert f" --text-embeddings {place / 'texts.safetensors'}" in capfd.readouterr().err
    adapted = load(replace(wanted, checkpoint=whole))
    apply_delta(model, load_delta(run))
    assert state_sha256(adapted) == state_sha256(model)
    export = ["export", str(run), *options, "--output", str(tmp_path / "exported"), "--format"]
    assert "timm takes neither zero-shot models nor" in refusal_of(capfd, *export, "timm")
    exported: list[str] = []

    def write(adapted: ExportableModel, *_: object, overwrite: bool) -> list[Path]:
        exported.append(state_sha256(adapted.model))
        return []

    monkeypatch.setattr("remtta.formats.export.export_model", write)
    assert remtta_here(*export, "onnx") == 0 and exported == [state_sha256(model)]


def test_what_does_not_fit_is_refused_in_a_line(place: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    texts, projected = place / "texts.safetensors", place / "projected.safetensors"
    content = load_file(texts)
    save_file(content, tmp_path / "plain.safetensors")
    (tmp_path / "bad.safetensors").write_bytes(b"nothing")
    refused: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"text_embeddings": tmp_path / "plain.safetensors"}, CheckpointError, "was not written by remtta text-embed"),
        ({"text_embeddings": tmp_path / "bad.safetensors"}, CheckpointError, "cannot be read"),
        ({"text_embeddings": texts, "labels": NAMES}, UsageError, "class names of their own"),
        ({"text_embeddings": texts, "prompts": "single"}, UsageError, "--prompts are for zero-shot models"),
        ({"text_embeddings": texts, "num_classes": 7}, CheckpointError, "does not fit"),
    ]
    for given, kind, message in refused:
        with pytest.raises(kind, match=message):
            load_model("test_vit", model_kwargs={"depth": 2}, **{"checkpoint": projected, "num_classes": 64, **given})
    seven = tmp_path / "seven.safetensors"
    save_file(timm.create_model("test_vit", num_classes=7).state_dict(), seven)
    with pytest.raises(ModelError, match="has image embeddings of size 7, and"):
        load_model("test_vit", checkpoint=seven, num_classes=7, text_embeddings=texts)
    with pytest.raises(UsageError, match="--text-embeddings"):
        load_model(f"clip:{place / 'clip'}", text_embeddings=texts)
    line = refusal_of(capfd, "text-embed", "--model", "test_vit", "--output", str(tmp_path / "o.safetensors"))
    assert "test_vit has no text tower" in line
    own = ("--checkpoint", str(texts), "--output", str(texts), "--overwrite")
    assert "would replace its own input" in refusal_of(capfd, "text-embed", "--model", f"clip:{place / 'clip'}", *own)


def test_the_shown_image_tower_has_the_activation_of_its_weights() -> None:
    shown = re.findall(r"text-embed --model clip:(\S+)/(\S+) .*\n.* --model (\S+) --crop-pct 1 ", PAGE.read_text())
    ((name, weights, tower_name),) = shown
    with torch.device("meta"):
        activation: Any = timm.create_model(tower_name).blocks[0].mlp.act
    assert open_clip.get_pretrained_cfg(name, weights)["quick_gelu"] == isinstance(activation, QuickGELU)
