import json
import re
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from huggingface_hub import constants
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import save_file
from timm.data import ImageNetInfo, create_transform, infer_imagenet_subset
from torch import nn

from remtta import Adapter
from remtta.deltas.base_model import base_options
from remtta.deltas.delta import Delta
from remtta.errors import CheckpointError, DownloadError, UsageError
from remtta.models import imagenet
from remtta.models.building import reachable_or_offline
from remtta.models.info import labels_of, model_info
from remtta.models.loading import load_model, select_device
from remtta.models.metadata import ModelWithMetadata
from remtta.models.preprocessing import INTERPOLATIONS, Preprocessing, preprocessing_of
from remtta.models.tensor_files import state_sha256, tensors_sha256
from remtta.options import ModelOptions
from remtta.runs.folder import check_same_model
from tests.conftest import NUM_CLASSES, TINY, draw_image, raising, tiny_vit

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


OWN: dict[str, Any] = {"mean": (0.1, 0.2, 0.3), "std": (0.4, 0.5, 0.6), "interpolation": "bilinear"}
OWN |= {"crop_pct": 0.75, "crop_mode": "squash"}


def _write_config(folder: Path, **changes: Any) -> None:
    config = {**OWN, "input_size": [3, 32, 32], "fixed_input_size": True}
    config |= {"classifier": "head", "first_conv": "patch_embed.proj"}
    content = {"architecture": NAME, "num_classes": NUM_CLASSES, "label_names": LETTERS, "model_args": TINY}
    text = json.dumps({**content, "pretrained_cfg": config, **changes})
    (folder / "config.json").write_text(text, encoding="utf-8")


def test_a_crop_is_the_config_s_or_imagenet_s_and_none_in_one_s_own_preprocessing() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, NUM_CLASSES))
    assert preprocessing_of(net).crop_pct == 0.875 and preprocessing_of(tiny_vit()).crop_pct == 0.9
    own = Preprocessing((48, 48))
    assert own.crop_pct == preprocessing_of(ModelWithMetadata(net, preprocessing=own)).crop_pct == 1


def test_a_local_folder_brings_weights_labels_and_preprocessing_without_a_network(
    local_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: pytest.fail("asked for an address"))
    model = load_model(f"local-dir:{local_dir}")
    assert state_sha256(model) == state_sha256(tiny_vit()) and not model.training
    assert labels_of(model) == LETTERS
    assert preprocessing_of(model) == Preprocessing((32, 32), **OWN)


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


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"num_classes": 10_000_000}, "it would take 1,869 MiB, but its weights file has only 0.2 MiB"),
        ({"num_classes": "seven"}, "its config.json describes no model that can be built (TypeError"),
        ({"model_args": [1]}, "its config.json describes no model that can be built (AttributeError"),
        ({"model_args": {**TINY, "depth": 5}}, "blocks.4"),
        ("{", "its config.json describes no model that can be built (JSONDecodeError"),
        (b"junk", "its weights are not a readable safetensors file"),
    ],
    ids=str,
)
def test_a_damaged_folder_is_reported_in_one_line(
    changes: dict[str, Any] | str | bytes, told: str, local_dir: Path
) -> None:
    if isinstance(changes, dict):
        _write_config(local_dir, **changes)
    elif isinstance(changes, str):
        (local_dir / "config.json").write_text(changes)
    else:
        (local_dir / "model.safetensors").write_bytes(changes)
    with pytest.raises(CheckpointError) as caught:
        load_model(f"local-dir:{local_dir}")
    assert told in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"model_kwargs": {"img_size": 100_000_000}}, "it would take "),
        ({"model_kwargs": {"depth": -1}}, "could not be built: number of steps must be non-negative"),
        ({"model_kwargs": {**TINY, "colour": "red"}}, "does not take these model arguments: "),
        ({"model_kwargs": {**TINY, "in_chans": 1}}, "takes 1 channels; remtta feeds RGB images"),
        ({"num_classes": 0}, "has no classifier head; choose a classifier, or give --checkpoint and --num-classes"),
        ({"name": "hf-hub:"}, "hf-hub: names no repository; write hf-hub:OWNER/NAME"),
        ({"name": "local-dir:absent"}, "local-dir:absent: no such folder with a config.json"),
        ({"checkpoint": "absent.pth"}, "absent.pth: no such checkpoint file"),
        ({"checkpoint": "."}, ".: a folder; name the file in it"),
        ({"name": "ftp:vit"}, 'no loader takes "ftp:vit"'),
        ({"name": "vit_bse_patch16_224"}, 'unknown model "vit_bse_patch16_224"; did you mean vit_base_patch16_224'),
        ({"name": "resnet"}, "did you mean resnet10t, resnet14t, resnet18?"),
        *(({"name": name}, f'unknown model "{name}"; remtta models lists') for name in ("0", "alexnet")),
    ],
    ids=str,
)
def test_a_model_that_cannot_be_is_reported_in_one_line(changes: dict[str, Any], told: str, checkpoint: Path) -> None:
    arguments = {"name": NAME, "checkpoint": checkpoint, "num_classes": NUM_CLASSES, "model_kwargs": TINY}
    with pytest.raises(UsageError) as caught:
        load_model(**{**arguments, **changes})
    assert told in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "current", "num_classes"),
    [
        ("vit_small_patch16_224_in21k", "vit_small_patch16_224.augreg_in21k", 21843),
        ("tf_efficientnet_b0_ns", "tf_efficientnet_b0.ns_jft_in1k", 1000),
        ("swsl_resnet50", "resnet50.fb_swsl_ig1b_ft_in1k", 1000),
    ],
)
def test_an_earlier_name_of_timms_is_read_and_its_present_one_reported(
    name: str, current: str, num_classes: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "remtta")
    save_file(timm.create_model(current).state_dict(), tmp_path / "weights.safetensors")
    model: Any = load_model(name, checkpoint=tmp_path / "weights.safetensors")
    assert (model_info(model).name, model.num_classes) == (current, num_classes)
    assert caplog.text.count(f"timm calls {name} {current} now") == 1


def test_a_run_made_with_an_earlier_name_can_be_resumed_and_applied_by_it(tmp_path: Path) -> None:
    record = {"model": {"name": "resnet50.fb_swsl_ig1b_ft_in1k"}}
    (tmp_path / "run.json").write_text(json.dumps(record), encoding="utf-8")
    check_same_model(tmp_path, "swsl_resnet50")
    with pytest.raises(UsageError, match=r"is ssl_resnet18$"):
        check_same_model(tmp_path, "ssl_resnet18")
    delta = Delta({}, "resnet50.fb_swsl_ig1b_ft_in1k", "", "tent")
    assert base_options(delta, ModelOptions("swsl_resnet50")).name == "swsl_resnet50"


@pytest.mark.parametrize("override", [{"mean": (0.3, 0.2, 0.1)}, {"crop_pct": 1.0}, {"input_size": (24, 40)}], ids=str)
def test_each_part_of_the_preprocessing_can_be_replaced_alone(override: dict[str, Any], local_dir: Path) -> None:
    weights = local_dir / "model.safetensors"
    if "input_size" in override:
        save_file(tiny_vit(img_size=override["input_size"]).state_dict(), weights)
    own = preprocessing_of(load_model(f"local-dir:{local_dir}", checkpoint=weights, **override)).as_dict()
    assert own == {"input_size": (32, 32), **OWN, **override}


@pytest.mark.parametrize(
    ("interpolation", "crop_mode"),
    [*((each, "center") for each in INTERPOLATIONS), ("bicubic", "squash"), ("bicubic", "border")],
)
@pytest.mark.parametrize("size", [(32, 40), (37, 37)])
@pytest.mark.parametrize("crop_pct", [0.875, 0.9, 1.0])
def test_an_image_becomes_what_timm_itself_makes_of_it(
    size: tuple[int, int], crop_pct: float, interpolation: str, crop_mode: str
) -> None:
    ours = Preprocessing(size, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225), interpolation, crop_pct, crop_mode)
    crop: Any = {"interpolation": interpolation, "crop_pct": crop_pct, "crop_mode": crop_mode}
    timms, normalised = (
        create_transform((3, *size), mean=ours.mean, std=ours.std, normalize=each, **crop) for each in (False, True)
    )
    transform = ours.transform()
    for width, height in ((50, 45), (90, 33), (20, 64), (37, 37)):
        image = draw_image(width, width, height)
        pixels = transform(image)
        assert torch.equal(pixels, timms(image))
        torch.testing.assert_close(ours.normalise(pixels.unsqueeze(0))[0], normalised(image), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("num_classes", [1000, 11221, 11821, 21841, 21842, 21843])
def test_imagenets_classes_are_timms(num_classes: int) -> None:
    timms = ImageNetInfo(str(infer_imagenet_subset({"num_classes": num_classes})))
    assert imagenet.wnids_of(num_classes) == timms.label_names()
    assert imagenet.names_of(num_classes) == timms.label_descriptions()
    assert imagenet.wnids_of(num_classes + 9) == imagenet.names_of(num_classes + 9) == []


def test_a_thousand_classes_are_imagenets(tmp_path: Path) -> None:
    save_file(tiny_vit(depth=1, num_classes=1000).state_dict(), tmp_path / "vit.safetensors")
    labels = labels_of(_load(tmp_path / "vit.safetensors", num_classes=None, model_kwargs={**TINY, "depth": 1})) or []
    assert (len(labels), labels[281]) == (1000, "tabby, tabby cat")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("lines.txt", "{}\n{}\n{}\n{}\n{}\n{}\n{}\n"),
        ("numbered.txt", "0 {}\n1: {}\n2 {}\n3\t{}\n4 {}\n5 {}\n6 {}\n"),
        ("list.json", '["{}", "{}", "{}", "{}", "{}", "{}", "{}"]'),
    ],
)
def test_labels_are_read_as_lines_numbered_lines_or_json(
    name: str, text: str, checkpoint: Path, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text.format(*LETTERS))
    assert labels_of(_load(checkpoint, labels=tmp_path / name)) == LETTERS
    (tmp_path / "config.json").write_text(json.dumps({"id2label": dict(enumerate(LETTERS))}))
    assert labels_of(_load(checkpoint, labels=tmp_path / "config.json")) == LETTERS
    (tmp_path / "wrong.json").write_text('{"a": "cat"}')
    with pytest.raises(UsageError, match="is neither a list of names nor"):
        _load(checkpoint, labels=tmp_path / "wrong.json")


def test_labels_of_another_number_of_classes_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "names.txt").touch()
    with pytest.raises(UsageError, match=r"--labels: .*names\.txt is empty"):
        _load(checkpoint, labels=tmp_path / "names.txt")
    with pytest.raises(UsageError) as caught:
        _load(checkpoint, labels=["cat", "dog"])
    assert str(caught.value) == (
        "got 2 labels for a model with 7 classes; give one for each, in their order, or leave --labels out"
    )


def test_a_preprocessing_that_a_file_does_not_name_is_reported(
    checkpoint: Path, local_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "remtta")
    _load(checkpoint)
    told = "using that of vit_tiny_patch16_224 (--mean 0.5 0.5 0.5 --std 0.5 0.5 0.5): check that it fits"
    assert told in caplog.text
    caplog.clear()
    _load(checkpoint, mean=0.5)
    load_model(f"local-dir:{local_dir}")
    load_model("remtta-demo")
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ({"mean": (0.5, 0.5)}, "mean needs three finite numbers (R G B), got [0.5, 0.5]"),
        ({"std": (1.0, 1.0, float("inf"))}, "std needs three finite numbers (R G B), got [1.0, 1.0, inf]"),
        ({"std": (1.0, 0.0, 1.0)}, "std must be positive, got [1.0, 0.0, 1.0]"),
        ({"interpolation": "cubic"}, 'unknown interpolation "cubic"; choose nearest, bilinear, bicubic, box, hamming,'),
        ({"crop_pct": 0.0}, "crop-pct must be in (0, 1], got 0"),
        ({"crop_pct": float("nan")}, "crop-pct must be in (0, 1], got nan"),
        ({"crop_mode": "middle"}, 'unknown crop_mode "middle"; choose center, squash, border'),
        *(
            ({"input_size": size}, f"input_size needs (height, width) in pixels, got {size}")
            for size in (224, (3, 224, 224), (0, 224), (1.5, 2))
        ),
    ],
)
def test_a_preprocessing_that_cannot_be_is_refused(override: dict[str, Any], message: str, checkpoint: Path) -> None:
    if not override.keys() & {"crop_mode", "input_size"}:
        with pytest.raises(UsageError, match=re.escape(message)):
            _load(checkpoint, **override)
    with pytest.raises(UsageError, match=re.escape(message)):
        Preprocessing(**{"input_size": (32, 32), **override})


def test_weights_that_cannot_be_downloaded_are_reported_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    offline = LocalEntryNotFoundError("cannot find the file in the local cache\nand outgoing traffic is disabled")
    monkeypatch.setattr(socket, "getaddrinfo", raising(OSError("no network")))
    monkeypatch.setattr(timm, "create_model", raising(offline))
    with pytest.raises(DownloadError) as caught:
        load_model(NAME)
    assert str(caught.value) == (
        f"the pretrained weights of {NAME} could not be downloaded; check the network, "
        "or give a weights file with --checkpoint (LocalEntryNotFoundError)"
    )


def test_downloaded_weights_are_named_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    model = timm.create_model(NAME)
    monkeypatch.setattr(timm, "create_model", lambda *_, **__: model)
    assert model_info(load_model(NAME)).name == f"{NAME}.augreg_in21k_ft_in1k"


def test_behind_a_proxy_the_hubs_name_need_not_resolve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("urllib.request.getproxies", lambda: {"https": "http://proxy:3128"})
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: pytest.fail("the proxy resolves names"))
    earlier = constants.HF_HUB_OFFLINE
    with reachable_or_offline():
        assert earlier == constants.HF_HUB_OFFLINE


@pytest.mark.parametrize(
    ("name", "num_gpus", "told"),
    [
        *((name, 1, f'unknown device "{name}"; choose auto, cpu, cuda or mps') for name in ("gpu", "cuda:first", "")),
        *((name, 0, f'device "{name}" is not available on this machine; use') for name in ("cuda:0", "mps")),
        ("cuda:1", 1, 'device "cuda:1" is not available'),
    ],
)
def test_devices_are_chosen_by_name(name: str, num_gpus: int, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(num_gpus))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert select_device("cpu").type == "cpu" and select_device("auto").type == ("cuda" if num_gpus else "cpu")
    with pytest.raises(UsageError, match=re.escape(told)):
        select_device(name)


def test_the_hash_changes_with_a_bit_a_name_a_dtype_or_a_shape_and_not_with_the_memory_layout() -> None:
    zeros = torch.zeros(2, 3)
    one = zeros.clone()
    one.view(torch.int32)[0, 0] ^= 1
    variants = [("a", zeros), ("b", zeros), ("a", one), ("a", zeros.int()), ("a", zeros.T), ("a", zeros.reshape(6))]
    assert len({tensors_sha256({name: tensor}) for name, tensor in variants}) == len(variants)
    assert tensors_sha256({"a": zeros.T.contiguous().T}) == tensors_sha256({"a": zeros})
    others = {"flag": torch.tensor([True]), "scale": torch.ones(1, dtype=torch.bfloat16), "empty": torch.zeros(0)}
    assert len(tensors_sha256(others)) == 64


def test_the_old_name_of_an_adapters_info_is_read_with_a_warning() -> None:
    adapter = Adapter(tiny_vit())
    with pytest.warns(DeprecationWarning, match=r"Adapter.card is called Adapter.info"):
        assert adapter.card is adapter.info


def test_numbers_of_numpy_are_preprocessing(local_dir: Path) -> None:
    given: dict[str, Any] = {"mean": np.float32(0.5), "std": np.array([0.25, 0.5, 1]), "input_size": np.int64(48)}
    found = preprocessing_of(load_model(f"local-dir:{local_dir}", **given))
    assert found == Preprocessing((48, 48), (0.5,) * 3, (0.25, 0.5, 1.0), "bilinear", 0.75, "squash")
    same: Any = {"mean": np.full(3, 0.5), "input_size": np.array([48, 48])}
    assert found == replace(found, **same)
    json.dumps(found.as_dict())


@pytest.mark.parametrize("size", [(3, 32, 32), (32,), (32, 0), (32.0, 32.0), "32"])
def test_an_input_size_that_is_none_is_refused(size: Any, local_dir: Path) -> None:
    with pytest.raises(UsageError, match=r"input_size needs \(height, width\) in pixels, got"):
        load_model(f"local-dir:{local_dir}", input_size=size)
