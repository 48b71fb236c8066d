import json
import struct
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from remtta._version import __version__
from remtta.backbones.lookup import backbone_of
from remtta.backbones.norms import adapted_norms
from remtta.deltas.base_model import base_options
from remtta.deltas.delta import Delta, apply_delta, load_delta, save_delta, save_weights
from remtta.errors import DeltaError, UsageError
from remtta.models.checkpoints import checkpoint_dtypes
from remtta.models.loading import load_model
from remtta.models.tensor_files import state_sha256
from remtta.models.weights import AdaptedWeights
from remtta.options import ModelOptions
from remtta.runs.inspection import classes_moved
from tests.conftest import NUM_CLASSES, TINY, random_images, tiny_vit

NAME = "vit_tiny_patch16_224"


def _adapted() -> tuple[nn.Module, Delta]:
    """A model whose norms have moved far from those of `tiny_vit()`, many across zero, and its delta."""
    vit = tiny_vit()
    base = state_sha256(vit)
    weights = AdaptedWeights(adapted_norms(backbone_of(vit)), {}, {})
    with torch.no_grad():
        for parameter in weights.parameters.values():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)))
    weights.commit()
    return vit, Delta(weights.committed[0], NAME, base, "rem", {"lr": 0.05}, frames=12, updates=weights.committed[1])


def _delta(model: nn.Module, **tensors: Tensor) -> Delta:
    named = {name.replace("__", "."): tensor for name, tensor in tensors.items()} or {"norm.weight": torch.ones(48)}
    return Delta(named, NAME, state_sha256(model), "rem")


def _load(checkpoint: Path) -> nn.Module:
    return load_model(NAME, checkpoint=checkpoint, num_classes=NUM_CLASSES, model_kwargs=TINY)


def test_other_weights_of_a_delta_are_left_out_of_the_next(vit: nn.Module) -> None:
    weights = AdaptedWeights(adapted_norms(backbone_of(vit)), dict(vit.named_parameters()), {})
    own = weights.committed[0].keys()
    weights.load({"head.bias": torch.ones(NUM_CLASSES)})
    assert weights.committed[0].keys() == own | {"head.bias"}
    weights.load({})
    assert weights.committed[0].keys() == own and torch.equal(
        vit.state_dict()["head.bias"], tiny_vit().state_dict()["head.bias"]
    )


def test_base_plus_delta_is_the_adapted_model_bit_for_bit(tmp_path: Path) -> None:
    adapted, delta = _adapted()
    save_delta(tmp_path / "delta.safetensors", delta)
    model = tiny_vit()
    apply_delta(model, load_delta(tmp_path / "delta.safetensors"))
    assert state_sha256(model) == state_sha256(adapted) != state_sha256(tiny_vit())
    with torch.no_grad():
        assert torch.equal(model(random_images(3)), adapted(random_images(3)))


def test_weights_keep_the_bases_dtype_where_it_holds_them_exactly(tmp_path: Path) -> None:
    half = {name: tensor.half() for name, tensor in tiny_vit().state_dict().items()}
    save_file(half, tmp_path / "base.safetensors")
    model = _load(tmp_path / "base.safetensors")
    apply_delta(model, _delta(model, norm__weight=torch.full((48,), 2**-20), norm__bias=torch.zeros(48)))
    dtypes = checkpoint_dtypes(model, tmp_path / "base.safetensors")
    assert save_weights(tmp_path / "adapted.safetensors", model, dtypes) == ["norm.weight"]
    written = load_file(tmp_path / "adapted.safetensors")
    assert {name for name, tensor in written.items() if tensor.dtype != torch.float16} == {"norm.weight"}
    assert state_sha256(_load(tmp_path / "adapted.safetensors")) == state_sha256(model)


def test_the_header_holds_every_promised_field_as_text(tmp_path: Path) -> None:
    tensors = {"norm.weight": torch.tensor([0.5])}
    options = {"checkpoint": "weights/\udcff.pth", "model_kwargs": {"img_size": 32}}
    delta = Delta(tensors, NAME, "ab" * 32, "rem", {"lr": 0.001}, frames=100, updates=2, model_options=options)
    save_delta(tmp_path / "delta.safetensors", delta)
    with safe_open(tmp_path / "delta.safetensors", framework="pt") as file:
        header = file.metadata()
    created = datetime.fromisoformat(header.pop("created"))
    assert created.utcoffset() == timedelta(0)
    assert json.loads(header.pop("hyperparameters")) == {"lr": 0.001}
    assert json.loads(header.pop("model_options")) == options
    assert json.loads(header.pop("preprocessing")) == {}
    assert len(header.pop("content_sha256")) == 64
    assert {**header, "created": _HEADER["created"]} == {**_HEADER, "remtta_version": __version__}
    assert load_delta(tmp_path / "delta.safetensors").model_options == options


def test_a_delta_may_move_any_weight_of_the_model(vit: nn.Module) -> None:
    before = dict(tiny_vit().named_parameters())
    apply_delta(vit, _delta(vit, head__bias=torch.arange(7.0), cls_token=torch.ones(1, 1, 48, dtype=torch.float64)))
    after = dict(vit.named_parameters())
    assert torch.equal(after["head.bias"], before["head.bias"] + torch.arange(7.0))
    assert torch.equal(after["cls_token"], before["cls_token"] + 1)


def test_weights_that_moved_far_are_warned_of_and_a_heads_offset_is_not(
    vit: nn.Module, caplog: pytest.LogCaptureFixture
) -> None:
    apply_delta(vit, _delta(vit, head__bias=torch.full((7,), 1e6)))
    assert not caplog.records
    apply_delta(vit, _delta(vit, norm__weight=torch.full((48,), 1e6)))
    assert "moves its weights by 1e+06 times their size" in caplog.text
    assert "the run that made it diverged" in caplog.text


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("norm.scale", torch.ones(48), "the delta changes norm.scale, which the model does not have"),
        ("norm.weight", torch.ones(47), "the delta's norm.weight has shape (47,), the model's has (48,)"),
        *(
            ("norm.weight", tensor, "the delta's norm.weight holds values that are not finite numbers")
            for tensor in (
                torch.full((48,), torch.nan),
                torch.full((48,), 1e300, dtype=torch.float64),  # more than the model can hold
                torch.ones(48).int(),
            )
        ),
    ],
)
def test_a_delta_that_does_not_fit_is_refused_and_the_model_untouched(
    name: str, tensor: Tensor, message: str, vit: nn.Module
) -> None:
    before = state_sha256(vit)
    # The first tensor fits: it must not have been added when the second is refused.
    delta = _delta(vit, head__bias=torch.ones(7), **{name: tensor})
    with pytest.raises(DeltaError) as caught:
        apply_delta(vit, delta)
    assert str(caught.value) == message
    assert state_sha256(vit) == before


def test_a_delta_made_on_other_weights_is_refused_and_the_model_untouched(vit: nn.Module) -> None:
    _, delta = _adapted()
    with torch.no_grad():
        dict(vit.named_parameters())["head.bias"][0] += 1e-3
    before = state_sha256(vit)
    with pytest.raises(DeltaError) as caught:
        apply_delta(vit, delta)
    assert str(caught.value) == (
        f"the delta was made on other weights (base {delta.base_sha256[:12]}..., this model is {before[:12]}...); "
        f"load the {NAME} checkpoint it was adapted from, with the same input size and model arguments"
    )
    assert state_sha256(vit) == before


@pytest.mark.parametrize(
    "values", [torch.tensor([0.0, torch.nan]), torch.tensor([torch.inf]), torch.tensor([1, 2])], ids=str
)
def test_values_that_are_not_finite_numbers_are_not_saved(values: Tensor, tmp_path: Path) -> None:
    path = tmp_path / "delta.safetensors"
    save_delta(path, Delta({"norm.weight": torch.ones(2)}, NAME, "ab", "rem"))
    before = path.read_bytes()
    with pytest.raises(DeltaError, match=r"the adapted norm\.weight holds values that are not finite numbers; nothing"):
        save_delta(path, Delta({"norm.bias": torch.ones(2), "norm.weight": values}, NAME, "ab", "rem"))
    assert path.read_bytes() == before


_HEADER = {"format_version": "1", "remtta_version": "0.1.0", "model": NAME, "base_sha256": "ab" * 32, "method": "rem"}
_HEADER |= {"frames": "100", "updates": "2", "created": "2026-01-01T00:00:00+00:00"}


def _refusal(path: Path) -> str:
    before = path.read_bytes()
    with pytest.raises(DeltaError) as caught:
        load_delta(path)
    assert path.read_bytes() == before
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_least_header_is_enough(tmp_path: Path) -> None:
    save_file({"norm.weight": torch.ones(48)}, tmp_path / "delta.safetensors", metadata=_HEADER)
    delta = load_delta(tmp_path / "delta.safetensors")
    assert (delta.frames, delta.updates, delta.hyperparameters, delta.model_options) == (100, 2, {}, {})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format_version": "2"}, "has delta format 2, this remtta reads 1; update remtta"),
        ({"frames": "many"}, "has a damaged header: invalid literal for int() with base 10: 'many'"),
        ({"hyperparameters": "{"}, "has a damaged header: Expecting property name"),
        ({"hyperparameters": "[1]"}, "has a damaged header: expected a JSON object, got [1]"),
        ({"model_options": "[" * 100_000}, "has a damaged header: "),
    ],
    ids=["newer format", "frames", "JSON", "no object", "too deep"],
)
def test_a_header_that_cannot_be_used_is_refused(changes: dict[str, str], message: str, tmp_path: Path) -> None:
    path = tmp_path / "delta.safetensors"
    save_file({"norm.weight": torch.ones(48)}, path, metadata={**_HEADER, **changes})
    assert _refusal(path).startswith(f"{path} {message}")


def test_other_safetensors_files_are_no_deltas(checkpoint: Path) -> None:
    assert _refusal(checkpoint) == f"{checkpoint} is not a remtta delta: its header lacks " + ", ".join(_HEADER)


@pytest.mark.parametrize(
    "content",
    [b"", b"hello, this is no delta", struct.pack("<Q", 2**60) + b"{}", struct.pack("<Q", 2) + b"{]"],
    ids=str,
)
def test_a_file_that_is_no_safetensors_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "delta.safetensors"
    path.write_bytes(content)
    assert _refusal(path).startswith(f"{path} is not a readable safetensors file: ")


def test_zero_is_a_value_but_empty_is_not() -> None:
    options = {"num_classes": 7, "model_kwargs": {"img_size": 32}, "use_ema": False}
    delta = Delta({}, "vit", "0" * 64, "rem", model_options=options, preprocessing={"crop_pct": 0.9})
    expected = ModelOptions("vit", num_classes=7, model_kwargs={"img_size": 32}, crop_pct=0.0)
    assert base_options(delta, ModelOptions(crop_pct=0.0)) == expected


@pytest.mark.parametrize(
    ("path", "present", "hint"),
    [
        ("delta.safetensors", None, ""),
        (".", None, "; a run that learns nothing has none"),
        (".", "deltas/rem_seed0.safetensors", "; there are deltas in .*deltas"),
        (".", "yard/delta.safetensors", "; there are deltas in .*yard"),
    ],
)
def test_a_missing_file_is_a_usage_error(path: str, present: str | None, hint: str, tmp_path: Path) -> None:
    if present:
        (tmp_path / present).parent.mkdir()
        (tmp_path / present).touch()
    with pytest.raises(UsageError, match=rf"delta\.safetensors: no such delta file{hint}$"):
        load_delta(tmp_path / path)


def test_a_centered_heads_bias_tells_which_classes_it_says_more_or_less_often() -> None:
    norm = {"norm.weight": np.ones(4), "norm.bias": np.ones(4)}
    bias = np.array([0.0, -0.5, 0.25, 0.0], dtype=np.float32)
    assert classes_moved({**norm, "head.bias": bias}) == [{"class": 1, "bias": -0.5}, {"class": 2, "bias": 0.25}]
    assert classes_moved({**norm, "head.bias": bias, "head_dist.bias": -bias}) == []
    assert classes_moved(norm) == classes_moved({**norm, "head.bias": bias, "head.weight": np.ones((4, 2))}) == []
