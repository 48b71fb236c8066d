"""Weights of transformers and torchvision, compared with these libraries themselves."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import BitImageProcessorPil, ConvNextImageProcessorPil, DeiTImageProcessorPil, ViTImageProcessorPil

from remtta.backbones.lookup import backbone_of
from remtta.errors import CheckpointError, UsageError
from remtta.formats.transformers_processors import image_settings
from remtta.models.checkpoints import checkpoint_dtypes
from remtta.models.info import labels_of, model_info
from remtta.models.loading import load_model
from remtta.models.preprocessing import Preprocessing, preprocessing_of
from remtta.models.tensor_files import state_sha256
from tests.command import refusal_of, remtta_here
from tests.conftest import NUM_CLASSES, draw_folder, draw_image
from tests.models.other_libraries import LABELS, TORCHVISION, TRANSFORMERS, randomised, saved
from tests.records import json_of, record_of

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def check_refused(model: str, reason: str, **options: Any) -> None:
    """Check that a model is refused in one line with this reason, a pattern, that names the folder."""
    with pytest.raises(CheckpointError, match=reason) as caught:
        load_model(model, **options)
    assert model.removeprefix("local-dir:") in str(caught.value)
    assert "\n" not in str(caught.value)


def _images(size: tuple[int, int] = (32, 32)) -> torch.Tensor:
    return torch.randn(3, 3, *size, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def _equal(ours: nn.Module, theirs: Any, **options: Any) -> bool:
    images = _images(preprocessing_of(ours).input_size)
    expected = theirs(images, **options).logits
    return bool(expected.std() > 0.05) and torch.allclose(ours(images), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", TRANSFORMERS)
def test_logits_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    theirs = randomised(TRANSFORMERS[family]())
    model = saved(theirs, tmp_path)
    ours = load_model(model)
    assert _equal(ours, theirs)
    assert labels_of(ours) == LABELS
    assert model_info(ours).name == model
    backbone, images = backbone_of(ours), _images(preprocessing_of(ours).input_size)
    with torch.no_grad():
        torch.testing.assert_close(backbone.logits(images), ours(images), atol=1e-5, rtol=1e-5)
    # Within the program, weights have other names than in a file.
    inner = {name: tensor.contiguous() for name, tensor in theirs.state_dict().items()}
    save_file(inner, tmp_path / "inner.safetensors")
    assert state_sha256(load_model(model, checkpoint=tmp_path / "inner.safetensors")) == state_sha256(ours)


@pytest.mark.parametrize("family", ["vit", "deit", "dinov2", "dinov2 with registers"])
def test_positions_of_another_input_size_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    theirs = randomised(TRANSFORMERS[family]())
    model, asked = saved(theirs, tmp_path), {} if "dinov2" in family else {"interpolate_pos_encoding": True}
    for size in ((48, 48), (16, 40)):
        assert _equal(load_model(model, input_size=size), theirs, **asked)


def test_weights_of_torch_are_read_without_running_them(tmp_path: Path) -> None:
    theirs = randomised(TRANSFORMERS["vit"]())
    model = saved(theirs, tmp_path)
    expected = state_sha256(load_model(model))
    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    assert state_sha256(load_model(model)) == expected
    torch.save(theirs, tmp_path / "pytorch_model.bin")
    check_refused(model, r"holds more than weights .* could run code, so it was not loaded")


def _square(side: int) -> dict[str, int]:
    return {"height": side, "width": side}


PROCESSORS: dict[str, tuple[str, Any]] = {
    "oblong": (
        "vit with other sizes",
        ViTImageProcessorPil(size={"height": 24, "width": 40}, resample=1, image_mean=[0.1, 0.2, 0.3]),
    ),
    "cropped": ("deit", DeiTImageProcessorPil(size=_square(40), crop_size=_square(32))),
    "of the short side": ("dinov2", BitImageProcessorPil(size={"shortest_edge": 36}, crop_size=_square(32))),
    "smaller than trained": ("dinov2", BitImageProcessorPil(size={"shortest_edge": 28}, crop_size=_square(24))),
    "squashed": ("swin", ViTImageProcessorPil(size={"height": 64, "width": 32}, resample=3)),
    "by a share": ("convnext", ConvNextImageProcessorPil(size={"shortest_edge": 64}, crop_pct=0.88)),
    "large": ("convnext", ConvNextImageProcessorPil(size={"shortest_edge": 384})),
    "not normalised": ("vit", ViTImageProcessorPil(size=_square(32), do_normalize=False)),
}


@pytest.mark.parametrize("kind", PROCESSORS)
def test_images_become_what_transformers_makes_of_them(kind: str, tmp_path: Path) -> None:
    family, processor = PROCESSORS[kind]
    ours = preprocessing_of(load_model(saved(TRANSFORMERS[family](), tmp_path, processor)))
    made, expected = _pixels(ours, processor)
    torch.testing.assert_close(made, expected, atol=1e-4, rtol=1e-4)


def _pixels(ours: Preprocessing, processor: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Return what a preprocessing and a processor of transformers make of images of several shapes, some of which
    leave odd margins.
    """
    images = [
        draw_image(width, width, height) for width, height in ((50, 50), (33, 66), (401, 200), (80, 50), (73, 64))
    ]
    expected = [torch.from_numpy(np.stack(processor(image)["pixel_values"])).float() for image in images]
    return [ours.normalise(ours.transform()(image).unsqueeze(0)) for image in images], expected


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("ViT", {"size": 36, "default_to_square": False, "do_center_crop": True, "crop_size": 32, "resample": 3}),
        ("ViT", {"size": 32}),
        ("ViT", {"size": 32, "do_rescale": False, "image_mean": [120, 110, 100], "image_std": [60, 61, 62]}),
        ("DeiT", {"size": 37, "crop_size": {"height": 32, "width": 32}}),
        ("DeiT", {"default_to_square": False}),
        ("Beit", {"size": 40, "do_center_crop": True, "crop_size": 31}),
        ("ConvNext", {"size": 60, "crop_pct": 0.9}),
        ("MobileNetV1", {"size": 41, "crop_size": 32}),
        ("MobileNetV2", {"size": 41, "crop_size": 32, "default_to_square": True}),
        ("EfficientNet", {"size": 40, "rescale_factor": 1 / 127.5, "rescale_offset": True}),
        ("EfficientNet", {"size": 40, "include_top": False, "resample": 0}),
        ("CLIP", {"size": 40, "crop_size": 32}),
        ("CLIP", {"size": 40, "default_to_square": True, "do_center_crop": False}),
        ("Bit", {"size": {"shortest_edge": 41}, "crop_size": 32, "do_normalize": False}),
        ("Siglip", {"size": [32, 40]}),
    ],
    ids=str,
)
def test_what_a_file_leaves_out_is_as_in_transformers(name: str, content: dict[str, Any], tmp_path: Path) -> None:
    saved_file = {"image_processor_type": f"{name}ImageProcessor", **content}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(saved_file), encoding="utf-8")
    settings = dict(image_settings(tmp_path, "vit", (32, 32)))
    ours = Preprocessing(tuple(settings.pop("input_size")[1:]), **settings)
    made, expected = _pixels(ours, getattr(transformers, f"{name}ImageProcessorPil")(**content))
    torch.testing.assert_close(made, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("content", "size", "crop_pct", "mode"),
    [
        ({"feature_extractor_type": "ViTFeatureExtractor", "size": 32, "resample": 2}, 32, 1.0, "squash"),
        ({"feature_extractor_type": "ConvNextFeatureExtractor", "size": 32, "crop_pct": 0.8}, 32, 0.8, "center_floor"),
        ({"image_processor_type": "BitImageProcessorFast", "size": {"shortest_edge": 236}}, 224, 0.949, "center_floor"),
    ],
    ids=str,
)
def test_older_and_newer_files_of_processors_are_read(
    content: dict[str, Any], size: int, crop_pct: float, mode: str, tmp_path: Path
) -> None:
    model = saved(TRANSFORMERS["convnext"](), tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(content), encoding="utf-8")
    ours = preprocessing_of(load_model(model))
    assert (ours.input_size, ours.crop_mode) == ((size, size), mode)
    assert ours.crop_pct == pytest.approx(crop_pct, abs=0.003)
    assert int(size / ours.crop_pct) == round(size / crop_pct)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({"image_processor_type": "LevitImageProcessor"}, "is of LevitImageProcessor, and remtta knows ViTImage"),
        ({"image_processor_type": "ViTImageProcessor", "size": {"longest_edge": 9}}, "KeyError: 'height'"),
        ({"image_processor_type": "ViTImageProcessor", "image_std": [1, 0, 1]}, "std must be positive"),
        ({"image_processor_type": "CLIPImageProcessor", "do_center_crop": False}, "keeps the aspect ratio of images"),
        ({"image_processor_type": "DeiTImageProcessor", "crop_size": {"height": 9, "width": 8}}, "of another shape"),
        ({"image_processor_type": "BitImageProcessor", "size": 24, "crop_size": 32}, "larger or of another shape"),
        ({"image_processor_type": "BitImageProcessor", "do_resize": False}, "of images without resizing them; set do_"),
        ({"image_processor_type": "ViTImageProcessor", "do_pad": True}, "pads images or limits their long side"),
        (
            {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 224, "longest_edge": 300}},
            "pads images or limits their long side",
        ),
        (
            {"image_processor_type": "ConvNextImageProcessor", "size": 48, "do_center_crop": True, "crop_size": 32},
            r"crops images twice, to \(48, 48\) and \(32, 32\)",
        ),
        ({"image_processor_type": "ViTImageProcessor", "size": 36, "default_to_square": False}, "add a crop_size"),
        ([], "AttributeError"),
    ],
    ids=str,
)
def test_a_processor_that_timm_has_none_of_is_refused(content: Any, reason: str, tmp_path: Path) -> None:
    model = saved(TRANSFORMERS["vit"](), tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(content), encoding="utf-8")
    check_refused(model, rf"preprocessor_config\.json.*{reason}")


def test_without_a_processor_the_usual_values_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ours = preprocessing_of(load_model(saved(TRANSFORMERS["vit"](), tmp_path)))
    assert (ours.mean, ours.std, ours.interpolation) == ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5), "bilinear")
    assert "has no preprocessor_config.json; where --mean," in caplog.text
    assert "images get the mean 0.5 0.5 0.5, the standard deviation 0.5 0.5 0.5 and the filter bilinear" in caplog.text


def test_images_of_another_size_than_the_models_are_refused_unless_chosen(tmp_path: Path) -> None:
    model = saved(TRANSFORMERS["vit"](), tmp_path, ViTImageProcessorPil(size=_square(48)))
    check_refused(model, r"makes images of 48 x 48 pixels.*32 x 32; choose with --input-size")
    assert preprocessing_of(load_model(model, input_size=(48, 48))).input_size == (48, 48)


def test_windows_that_have_to_be_padded_are_refused(tmp_path: Path) -> None:
    model = saved(TRANSFORMERS["swin"](), tmp_path)
    for size in ((32, 40), (16, 32), (20, 20), (33, 33)):
        check_refused(model, r"windows; choose an --input-size that is a multiple of 16 x 16", input_size=size)
    assert preprocessing_of(load_model(model, input_size=(64, 32))).input_size == (64, 32)


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        (
            "vit",
            {"model_type": "beit"},
            r"holds a model of type 'beit'; .* reads vit, deit, dinov2, dinov2_with_registers, swin, convnext; conv",
        ),
        ("vit", {"hidden_act": "relu"}, r"says hidden_act='relu'; timm's model supports only 'gelu'$"),
        ("vit", {"architectures": ["ViTModel"]}, r"says ViTModel; remtta reads ViTForImageClassification$"),
        ("vit", {"id2label": {"3": "cat"}}, r"id2label that does not count from 0: \{'3': 'cat'\}"),
        ("vit", {"intermediate_size": 4_000_000}, r"it would take 1,\d+ MiB, but its weights file has only 0"),
        ("vit", {"num_attention_heads": 5}, r"describes no model that can be built \(.*divisible"),
        ("swin", {"use_absolute_embeddings": True}, r"says use_absolute_embeddings=True"),
        ("vit", {"num_hidden_layers": 1}, r"unknown to the model: blocks\.1\."),
        ("vit", {"id2label": {"0": "a", "1": "b"}}, r"the file has 7 classes"),
    ],
)
def test_what_timm_cannot_express_is_refused_in_a_line(
    family: str, changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    model = saved(TRANSFORMERS[family](), tmp_path)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json_of(config) | changes))
    check_refused(model, reason)


def test_weights_that_are_missing_or_too_many_are_named(tmp_path: Path) -> None:
    model, weights = saved(TRANSFORMERS["dinov2"](), tmp_path), tmp_path / "model.safetensors"
    state = load_file(weights)
    state["dinov2.neck.weight"] = state.pop("dinov2.encoder.layer.1.attention.attention.key.bias")
    save_file(state, weights)
    missing = r"missing in the file: blocks\.1\.attn\.qkv\.bias; unknown to the model: blocks\.1\.attn\.query\.bias"
    check_refused(model, rf"{missing}.*neck\.weight")
    weights.rename(tmp_path / "model.safetensors.index.json")
    check_refused(model, r"are in several files; save them as one")
    (tmp_path / "model.safetensors.index.json").unlink()
    check_refused(model, r"has no model\.safetensors; save the model again, or give --checkpoint")


def test_weights_without_their_folder_or_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    model, weights = saved(TRANSFORMERS["vit"](), tmp_path), tmp_path / "model.safetensors"
    with pytest.raises(CheckpointError, match=r"give the folder that has both, as --model local-dir:FOLDER$"):
        load_model("vit_tiny_patch16_224", checkpoint=weights)
    save_file({**load_file(weights), "vit.layers.0.mlp.fc1.bias": torch.zeros(50)}, weights)
    check_refused(model, r"holds inconsistent weights: .*blocks\.0\.mlp\.fc1\.bias occurs more than once")


def test_placeholders_of_transformers_are_no_class_names(tmp_path: Path) -> None:
    three, two = (TRANSFORMERS["vit"](id2label=None, label2id=None, **sizes) for sizes in ({"num_labels": 3}, {}))
    assert labels_of(load_model(saved(three, tmp_path / "three"))) is None
    assert load_model(saved(two, tmp_path / "two")).num_classes == 2


def test_classes_and_arguments_that_contradict_the_folder_are_refused(tmp_path: Path) -> None:
    model = saved(TRANSFORMERS["vit"](), tmp_path)
    with pytest.raises(UsageError, match=r"comes with a head for 7 classes; with --num-classes 3"):
        load_model(model, num_classes=3)
    assert load_model(model, num_classes=NUM_CLASSES).num_classes == NUM_CLASSES
    with pytest.raises(UsageError, match="leave --model-kwargs out"):
        load_model(model, model_kwargs={"depth": 3})


def test_an_adapted_checkpoint_has_timms_names_and_the_folders_dtypes_and_goes_with_the_folder(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder, run, adapted = tmp_path / "model", tmp_path / "run", tmp_path / "adapted.safetensors"
    model = saved(randomised(TRANSFORMERS["vit"]()).to(torch.bfloat16), folder)
    base = load_model(model)
    frames = draw_folder(tmp_path / "frames", range(4))
    assert remtta_here("adapt", frames, "--model", model, "--batch-size", "2", "--output", run, "--quiet") == 0
    told = record_of(run)["model"]
    assert (told["name"], told["base_sha256"]) == (model, state_sha256(base))
    assert remtta_here("apply", run, "--model", model, "--output", adapted) == 0
    written = load_file(adapted)
    assert "blocks.0.attn.qkv.weight" in written
    dtypes = {tensor.dtype for name, tensor in written.items() if "norm" not in name and name != "head.bias"}
    assert dtypes == {torch.bfloat16}
    tuned = load_model(model, checkpoint=adapted)
    assert labels_of(tuned) == LABELS and state_sha256(tuned) != state_sha256(base)
    capfd.readouterr()
    into: list[str | Path] = ["--output", folder / "model.safetensors", "--overwrite"]
    assert "would replace its own input" in refusal_of(capfd, "apply", run, "--model", model, *into)
    line = refusal_of(capfd, "export", run, "--model", model, "--format", "timm", "--output", tmp_path / "timm")
    assert "folders saved by transformers; use --format onnx" in line
    saved(randomised(TRANSFORMERS["vit"](), seed=1), folder)
    refusal_of(capfd, "apply", run, "--model", model, "--output", tmp_path / "x.safetensors", code=4)


@pytest.mark.parametrize("family", TORCHVISION)
def test_logits_are_those_of_torchvision(family: str, tmp_path: Path) -> None:
    make, name, kwargs = TORCHVISION[family]
    theirs, path = randomised(make()), tmp_path / "theirs.pth"
    torch.save({"loss.w": torch.ones(1), **{f"net.{key}": value for key, value in theirs.state_dict().items()}}, path)
    ours = load_model(name, checkpoint=path, num_classes=7, model_kwargs=kwargs)
    images = _images()
    with torch.no_grad():
        expected = theirs(images)
        assert expected.std() > 0.05
        torch.testing.assert_close(ours(images), expected, atol=1e-5, rtol=1e-5)
    assert (preprocessing_of(ours).mean, preprocessing_of(ours).std) == (MEAN, STD)
    given = load_model(name, checkpoint=path, num_classes=7, model_kwargs=kwargs, mean=(0.5, 0.5, 0.5))
    assert (preprocessing_of(given).mean, preprocessing_of(given).std) == ((0.5, 0.5, 0.5), STD)
    assert checkpoint_dtypes(ours, path).keys() == ours.state_dict().keys()


def test_an_older_vit_is_read(tmp_path: Path) -> None:
    make, name, kwargs = TORCHVISION["vit"]
    theirs = make()
    state = {
        old.replace("mlp.0.", "mlp.linear_1.").replace("mlp.3.", "mlp.linear_2."): tensor
        for old, tensor in theirs.state_dict().items()
    }
    loaded = []
    for number, weights in enumerate((state, theirs.state_dict())):
        save_file(weights, tmp_path / f"{number}.safetensors")
        path = tmp_path / f"{number}.safetensors"
        loaded.append(load_model(name, checkpoint=path, num_classes=7, model_kwargs=kwargs).state_dict())
    torch.testing.assert_close(*loaded, rtol=0, atol=0)
