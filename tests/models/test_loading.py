from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from huggingface_hub import constants
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import save_file
from timm.data import create_transform, resolve_model_data_config
from torch import nn

from remtta.backbones.families import backbone_of, check_adaptable
from remtta.errors import CheckpointError, DownloadError, ModelError, UsageError
from remtta.models.classes import restrict_classes
from remtta.models.devices import select_device
from remtta.models.hashing import state_sha256
from remtta.models.hub import reachable_or_offline
from remtta.models.labels import labels_of
from remtta.models.loading import load_model
from remtta.models.preprocessing import INTERPOLATIONS, Preprocessing, preprocessing_of
from tests.conftest import NUM_CLASSES, TINY, draw_image, tiny_vit

NAME = "vit_tiny_patch16_224"
LETTERS = list("abcdefg")


def _load(checkpoint: Path | str, **changes: Any) -> nn.Module:
    options: dict[str, Any] = {"num_classes": NUM_CLASSES, "model_kwargs": TINY, **changes}
    return load_model(NAME, checkpoint=checkpoint, **options)


@pytest.fixture
def local_dir(tmp_path: Path) -> Path:
    """A folder as timm saves it for the hub, with labels and a preprocessing of its own."""
    folder = tmp_path / "local"
    folder.mkdir()
    save_file(tiny_vit().state_dict(), folder / "model.safetensors")
    _write_config(folder)
    return folder


def _write_config(folder: Path, **changes: Any) -> None:
    preprocessing = {
        "input_size": [3, 32, 32],
        "fixed_input_size": True,
        "interpolation": "bilinear",
        "crop_pct": 0.75,
        "crop_mode": "squash",
        "mean": [0.1, 0.2, 0.3],
        "std": [0.4, 0.5, 0.6],
        "classifier": "head",
        "first_conv": "patch_embed.proj",
    }
    content = {
        "architecture": NAME,
        "num_classes": NUM_CLASSES,
        "label_names": LETTERS,
        "model_args": TINY,
        "pretrained_cfg": preprocessing,
        **changes,
    }
    (folder / "config.json").write_text(json.dumps(content), encoding="utf-8")


def test_a_checkpoint_gives_an_fp32_classifier_in_eval_mode(checkpoint: Path) -> None:
    model = _load(checkpoint)
    assert not model.training
    assert state_sha256(model) == state_sha256(tiny_vit())
    assert {tensor.dtype for tensor in model.state_dict().values()} == {torch.float32}
    assert labels_of(model) is None


def test_a_local_folder_brings_weights_labels_and_preprocessing(local_dir: Path) -> None:
    model = load_model(f"local-dir:{local_dir}")
    assert state_sha256(model) == state_sha256(tiny_vit())
    assert labels_of(model) == LETTERS
    assert preprocessing_of(model) == Preprocessing(
        (32, 32), (0.1, 0.2, 0.3), (0.4, 0.5, 0.6), "bilinear", 0.75, "squash"
    )


def test_a_local_folder_may_get_its_weights_from_a_checkpoint(local_dir: Path, tmp_path: Path) -> None:
    save_file(tiny_vit(5).state_dict(), tmp_path / "other.safetensors")
    model = load_model(f"local-dir:{local_dir}", checkpoint=tmp_path / "other.safetensors")
    assert state_sha256(model) == state_sha256(tiny_vit(5))
    assert labels_of(model) == LETTERS


@pytest.mark.parametrize(
    ("label_names", "expected"),
    [
        ({str(number): letter for number, letter in enumerate(LETTERS)}, LETTERS),
        ({str(6 - number): letter for number, letter in enumerate(LETTERS)}, LETTERS[::-1]),
        ({str(1 + number): letter for number, letter in enumerate(LETTERS)}, None),
        (["only", "two"], None),
        (None, None),
    ],
)
def test_labels_of_a_local_folder_count_only_if_they_name_every_class(
    label_names: object, expected: list[str] | None, local_dir: Path
) -> None:
    _write_config(local_dir, label_names=label_names)
    assert labels_of(load_model(f"local-dir:{local_dir}")) == expected
    assert labels_of(timm.create_model(f"local-dir:{local_dir}", pretrained=True)) == expected


def test_a_local_folder_needs_no_network(local_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise AssertionError("asked for an address")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    assert isinstance(load_model(f"local-dir:{local_dir}"), nn.Module)


def test_weights_of_a_local_folder_that_do_not_fit_are_told_in_one_line(local_dir: Path) -> None:
    with pytest.raises(ModelError, match=r"could not be built: .*pos_embed|.*blocks\.3") as caught:
        load_model(f"local-dir:{local_dir}", model_kwargs={"depth": 3})
    assert "\n" not in str(caught.value)


def test_code_in_a_local_folder_is_not_run(local_dir: Path, tmp_path: Path) -> None:
    class Runs:
        def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
            return os.mkdir, (str(tmp_path / "marker"),)

    (local_dir / "model.safetensors").unlink()
    torch.save({"epoch": Runs()}, local_dir / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"could not be built"):
        load_model(f"local-dir:{local_dir}")
    assert not (tmp_path / "marker").exists()


def test_a_folder_of_neither_timm_nor_transformers_is_told(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"depth": 3}', encoding="utf-8")
    with pytest.raises(
        ModelError, match=r"its config\.json names no architecture of timm; one of transformers goes by"
    ):
        load_model(f"local-dir:{tmp_path}")


def test_a_missing_local_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"absent: no such folder with a config.json"):
        load_model(f"local-dir:{tmp_path / 'absent'}")


def test_preprocessing_defaults_to_the_models_own_config(checkpoint: Path) -> None:
    assert preprocessing_of(_load(checkpoint)) == Preprocessing(
        (32, 32), (0.5, 0.5, 0.5), (0.5, 0.5, 0.5), "bicubic", 0.9, "center"
    )


@pytest.mark.parametrize(
    "override",
    [
        {"mean": (0.1, 0.2, 0.3)},
        {"std": (0.4, 0.5, 0.6)},
        {"interpolation": "lanczos"},
        {"crop_pct": 1.0},
        {"input_size": (24, 40)},
    ],
    ids=str,
)
def test_each_part_of_the_preprocessing_can_be_replaced_alone(override: dict[str, Any], local_dir: Path) -> None:
    weights = local_dir / "model.safetensors"
    if "input_size" in override:
        save_file(tiny_vit(img_size=override["input_size"]).state_dict(), weights)
    own = preprocessing_of(load_model(f"local-dir:{local_dir}", checkpoint=weights, **override)).as_dict()
    _write_config(local_dir)
    assert own == {
        "input_size": (32, 32),
        "mean": (0.1, 0.2, 0.3),
        "std": (0.4, 0.5, 0.6),
        "interpolation": "bilinear",
        "crop_pct": 0.75,
        "crop_mode": "squash",
        **override,
    }


def test_another_input_size_resamples_the_checkpoint(checkpoint: Path) -> None:
    kwargs = {key: value for key, value in TINY.items() if key != "img_size"}
    model = _load(checkpoint, model_kwargs=kwargs, input_size=(48, 48))
    assert preprocessing_of(model).input_size == (48, 48)
    with torch.no_grad():
        assert model(torch.zeros(1, 3, 48, 48)).shape == (1, NUM_CLASSES)


def test_a_model_of_any_size_gets_images_of_the_size_asked_for(tmp_path: Path) -> None:
    name, kwargs = "naflexvit_base_patch16_gap", {"embed_dim": 48, "depth": 1, "num_heads": 3}
    save_file(timm.create_model(name, num_classes=NUM_CLASSES, **kwargs).state_dict(), tmp_path / "naflex.safetensors")
    model = load_model(
        name,
        checkpoint=tmp_path / "naflex.safetensors",
        num_classes=NUM_CLASSES,
        model_kwargs=kwargs,
        input_size=(48, 64),
    )
    assert preprocessing_of(model).input_size == (48, 64)
    assert backbone_of(model).num_patches == 12


@pytest.mark.parametrize("crop_mode", ["center", "squash", "border"])
@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
def test_an_image_becomes_what_timm_itself_makes_of_it(interpolation: str, crop_mode: str) -> None:
    ours = Preprocessing((32, 40), (0.485, 0.456, 0.406), (0.229, 0.224, 0.225), interpolation, 0.875, crop_mode)
    timms = create_transform(
        input_size=(3, 32, 40),
        mean=ours.mean,
        std=ours.std,
        interpolation=interpolation,
        crop_pct=0.875,
        crop_mode=crop_mode,
    )
    transform = ours.transform()
    for width, height in ((50, 45), (90, 33), (20, 64)):
        image = draw_image(width, width, height)
        pixels = transform(image)
        assert pixels.dtype == torch.uint8
        torch.testing.assert_close(ours.normalise(pixels.unsqueeze(0))[0], timms(image), atol=1e-6, rtol=1e-6)


def test_a_loaded_models_preprocessing_is_the_one_timm_resolves(local_dir: Path) -> None:
    model = load_model(f"local-dir:{local_dir}", crop_pct=0.9)
    ours, timms = preprocessing_of(model), create_transform(**resolve_model_data_config(model))
    image = draw_image(0)
    torch.testing.assert_close(ours.normalise(ours.transform()(image).unsqueeze(0))[0], timms(image))


def test_a_thousand_classes_are_imagenets(tmp_path: Path) -> None:
    save_file(tiny_vit(depth=1, num_classes=1000).state_dict(), tmp_path / "vit.safetensors")
    labels = labels_of(_load(tmp_path / "vit.safetensors", num_classes=None, model_kwargs={**TINY, "depth": 1}))
    assert labels is not None
    assert len(labels) == 1000
    assert labels[281] == "tabby, tabby cat"


def test_given_labels_replace_the_models_own(local_dir: Path) -> None:
    given = LETTERS[::-1]
    assert labels_of(load_model(f"local-dir:{local_dir}", labels=given)) == given


def test_labels_of_another_number_of_classes_are_refused(checkpoint: Path) -> None:
    with pytest.raises(UsageError) as caught:
        _load(checkpoint, labels=["cat", "dog"])
    assert str(caught.value) == "the label file names 2 classes, but the model has 7"


def test_what_no_method_adapts_is_refused_before_anything_is_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", _no_network)
    for name in ("mixer_b16_224", "mixer_b16_224.goog_in21k_ft_in1k"):
        with pytest.raises(ModelError, match=rf"^{name} cannot be adapted: MlpMixer is in no family .* remtta models"):
            check_adaptable(name)
    with pytest.raises(ModelError, match="pools no tokens"):
        check_adaptable(NAME, {**TINY, "global_pool": ""})
    for name in (NAME, "vit_bse_patch16_224", "local-dir:nowhere", "remtta-demo"):
        check_adaptable(name, TINY)
    check_adaptable(NAME, {"colour": "red"})  # load_model tells


def test_an_unknown_name_is_refused_with_names_like_it() -> None:
    with pytest.raises(UsageError, match=r'^unknown model "vit_bse_patch16_224"; did you mean .*vit_base_patch16_224'):
        load_model("vit_bse_patch16_224")
    with pytest.raises(UsageError, match=r'^unknown model "0"; .*timm\.list_models\(\)'):
        load_model("0")


def test_an_unknown_source_is_refused() -> None:
    with pytest.raises(ModelError, match=r"ftp:vit could not be built: .*hf-hub, local-dir"):
        load_model("ftp:vit", checkpoint="vit.pth")


def test_another_number_of_classes_than_the_pretrained_head_needs_a_checkpoint(local_dir: Path) -> None:
    with pytest.raises(UsageError, match=r"comes with a head for 7 classes; with --num-classes 3 .* --checkpoint$"):
        load_model(f"local-dir:{local_dir}", num_classes=3)
    assert load_model(f"local-dir:{local_dir}", num_classes=7).num_classes == 7


def test_a_model_without_a_classifier_head_is_refused(checkpoint: Path) -> None:
    with pytest.raises(
        ModelError, match=r"has no classifier head; choose a classifier, or give --checkpoint and --num"
    ):
        _load(checkpoint, num_classes=0)


def test_a_model_of_other_channels_is_refused(checkpoint: Path) -> None:
    with pytest.raises(ModelError, match=r"takes 1 channels; remtta feeds RGB images"):
        _load(checkpoint, model_kwargs={**TINY, "in_chans": 1})


def test_arguments_the_model_does_not_take_are_a_usage_error(checkpoint: Path) -> None:
    with pytest.raises(UsageError, match=r"does not take these model arguments: .*colour"):
        _load(checkpoint, model_kwargs={**TINY, "colour": "red"})
    with pytest.raises(ModelError, match=r"could not be built: dim should be divisible by num_heads"):
        _load(checkpoint, model_kwargs={**TINY, "num_heads": 5})


def test_a_checkpoint_that_does_not_fit_is_refused(checkpoint: Path) -> None:
    with pytest.raises(CheckpointError, match=r"the file has 7 classes: see --num-classes"):
        _load(checkpoint, num_classes=5)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ({"mean": (0.5, 0.5)}, "mean needs three finite numbers (R G B), got [0.5, 0.5]"),
        ({"mean": (0.5, 0.5, float("nan"))}, "mean needs three finite numbers (R G B), got [0.5, 0.5, nan]"),
        ({"std": (1.0, 1.0, float("inf"))}, "std needs three finite numbers (R G B), got [1.0, 1.0, inf]"),
        ({"std": (1.0, 0.0, 1.0)}, "std must be positive, got [1.0, 0.0, 1.0]"),
        (
            {"interpolation": "cubic"},
            'unknown interpolation "cubic"; choose nearest, bilinear, bicubic, box, hamming, lanczos',
        ),
        ({"crop_pct": 0.0}, "crop-pct must be in (0, 1], got 0"),
        ({"crop_pct": 1.01}, "crop-pct must be in (0, 1], got 1.01"),
        ({"crop_pct": float("nan")}, "crop-pct must be in (0, 1], got nan"),
    ],
)
def test_a_preprocessing_that_cannot_be_is_refused(override: dict[str, Any], message: str, checkpoint: Path) -> None:
    with pytest.raises(UsageError) as caught:
        _load(checkpoint, **override)
    assert str(caught.value) == message


def test_weights_that_cannot_be_downloaded_are_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*args: object, **kwargs: object) -> None:
        raise LocalEntryNotFoundError("cannot find the file in the local cache\nand outgoing traffic is disabled")

    monkeypatch.setattr(socket, "getaddrinfo", _no_network)
    monkeypatch.setattr(timm, "create_model", offline)
    with pytest.raises(DownloadError) as caught:
        load_model(NAME)
    assert str(caught.value) == (
        f"the pretrained weights of {NAME} could not be downloaded; check the network, "
        "or give a weights file with --checkpoint (LocalEntryNotFoundError)"
    )


def _no_network(*args: object) -> None:
    raise OSError("no network")


def test_devices_are_chosen_by_name() -> None:
    assert select_device("cpu") == torch.device("cpu")
    assert select_device("auto").type in ("cpu", "cuda", "mps")


@pytest.mark.parametrize("name", ["gpu", "cuda:first", ""])
def test_an_unknown_device_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(UsageError) as caught:
        select_device(name)
    assert str(caught.value) == f'unknown device "{name}"; choose auto, cpu, cuda or mps'


@pytest.mark.parametrize("name", ["cuda", "cuda:0", "mps", "meta"])
def test_a_device_that_is_not_here_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(UsageError, match=f'device "{name}" is not available on this machine; use --device cpu'):
        select_device(name)


def test_the_hash_changes_with_a_single_bit(vit: nn.Module) -> None:
    before = state_sha256(vit)
    bits = dict(vit.named_parameters())["norm.bias"].data.view(torch.int32)
    bits[0] ^= 1
    assert state_sha256(vit) != before
    bits[0] ^= 1
    assert state_sha256(vit) == before


def test_the_hash_changes_with_a_name_a_dtype_or_a_shape() -> None:
    def holding(name: str, value: torch.Tensor) -> str:
        module = nn.Module()
        module.register_buffer(name, value)
        return state_sha256(module)

    zeros = torch.zeros(2, 3)
    variants = [
        holding("a", zeros),
        holding("b", zeros),
        holding("a", zeros.int()),
        holding("a", zeros.T.contiguous()),
        holding("a", zeros.reshape(6)),
    ]
    assert len(set(variants)) == len(variants)


def test_the_hash_does_not_change_with_the_memory_layout_or_the_mode(vit: nn.Module) -> None:
    before = state_sha256(vit)
    weight = dict(vit.named_parameters())["head.weight"]
    weight.data = weight.data.T.contiguous().T
    assert not weight.is_contiguous()
    assert state_sha256(vit) == before
    assert state_sha256(vit.train().requires_grad_(False)) == before


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_hash_does_not_change_with_the_device(vit: nn.Module) -> None:
    before = state_sha256(vit)
    assert state_sha256(vit.to("cuda")) == before


def test_the_hash_takes_scalars_flags_and_half_precision() -> None:
    module = nn.BatchNorm1d(2)  # num_batches_tracked is a 0-d integer
    module.register_buffer("flag", torch.tensor([True, False]))
    module.register_buffer("scale", torch.tensor([1.5], dtype=torch.bfloat16))
    module.register_buffer("nothing", torch.zeros(0))
    assert len(state_sha256(module)) == 64


def test_behind_a_proxy_the_hubs_name_need_not_resolve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("urllib.request.getproxies", lambda: {"https": "http://proxy:3128"})
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: pytest.fail("the proxy resolves names"))
    earlier = constants.HF_HUB_OFFLINE
    with reachable_or_offline():
        assert earlier == constants.HF_HUB_OFFLINE


def test_a_head_that_is_no_linear_layer_keeps_its_classes() -> None:
    model: Any = tiny_vit()
    model.head = nn.Sequential(model.head)
    with pytest.raises(ModelError, match="the model's head is no linear layer, so its classes cannot be restricted"):
        restrict_classes(model, [0, 2])


@pytest.mark.parametrize("name", ["resnet18", "convnext_atto", "mobilevit_xxs"])
def test_a_convolutional_model_takes_an_input_size_in_its_stride(name: str, tmp_path: Path) -> None:
    weights = tmp_path / "weights.safetensors"
    save_file(timm.create_model(name, pretrained=False, num_classes=7).state_dict(), weights)
    model = load_model(name, checkpoint=weights, num_classes=7, input_size=(64, 96))
    assert preprocessing_of(model).input_size == (64, 96)
    assert backbone_of(model).num_patches == 2 * 3


def test_windows_are_made_for_an_input_size(tmp_path: Path) -> None:
    kwargs = {"depths": (1, 1, 1, 1), "embed_dim": 8, "num_heads": (1, 1, 1, 1), "window_size": 4}
    name, weights = "swin_tiny_patch4_window7_224", tmp_path / "weights.safetensors"
    small: Any = timm.create_model(name, pretrained=False, num_classes=7, img_size=128, **kwargs)
    save_file(small.state_dict(), weights)
    model = load_model(name, checkpoint=weights, num_classes=7, input_size=(128, 128), model_kwargs=kwargs)
    assert preprocessing_of(model).input_size == backbone_of(model).input_size == (128, 128)
