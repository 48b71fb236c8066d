import argparse
import os
import pickle
import re
import warnings
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.models.beit import checkpoint_filter_fn as beit_filter
from timm.models.eva import checkpoint_filter_fn as eva_filter
from timm.models.vision_transformer import checkpoint_filter_fn
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from remtta.errors import CheckpointError
from remtta.models import checkpoints
from remtta.models.checkpoints import checkpoint_dtypes, load_checkpoint
from remtta.models.conversion import renamed
from remtta.models.tensor_files import state_sha256
from tests.backbones.tiny_models import tiny
from tests.conftest import tiny_vit

State = dict[str, Tensor]


def _vit(seed: int = 0, **changes: Any) -> nn.Module:
    return tiny_vit(seed, **{"depth": 1, "embed_dim": 12, **changes})


def _state(seed: int = 0, **changes: Any) -> State:
    return dict(_vit(seed, **changes).state_dict())


def _holds(model: nn.Module, state: State) -> bool:
    own = model.state_dict()
    return own.keys() == state.keys() and all(torch.equal(own[name], tensor) for name, tensor in state.items())


def _refusal(path: Path, **changes: Any) -> str:
    """The text of the refusal, which must be one line and leave the model as it was."""
    model = _vit(1, **changes)
    before = state_sha256(model)
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(model, path)
    assert state_sha256(model) == before
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def _under(prefix: str, state: State) -> State:
    return {prefix + name: tensor for name, tensor in state.items()}


@pytest.mark.parametrize(
    "wrap",
    [
        lambda state: state,
        lambda state: {"state_dict": state, "epoch": 3},
        lambda state: {"model": state, "lr_scheduler": {"last_lr": [0.1]}},
        lambda state: {f"_orig_mod.{name}": tensor for name, tensor in state.items()},
        lambda state: {"state_dict": {f"_orig_mod.module.{name}": tensor for name, tensor in state.items()}},
        lambda state: {"state_dict": {f"net.{name}": tensor for name, tensor in state.items()}},
        lambda state: AveragedModel(_vit()).state_dict(),
        lambda state: {"net": state, "best_acc": np.float64(71.2), "history": np.arange(3.0)},
        lambda state: {"weights": state, "root": Path("runs") / "1", "optimizer": {"state": {0: {"step": 1}}}},
        lambda state: {"student": _state(5), "teacher": state},
        lambda state: {"ema": state, "epoch": np.int64(3)},
        lambda state: {"anything": state, "epoch": 3},
        lambda state: {
            "state_dict": {**_under("model.", state), "train_acc.tp": torch.ones(3), "loss.w": torch.ones(1)}
        },
        lambda state: {**_under("ema_model.", _state(5)), **_under("model.", state)},
        lambda state: {"0.mean": torch.zeros(3), "0.std": torch.ones(3), **_under("1.module.", state)},
    ],
)
def test_weights_are_found_however_they_were_saved(wrap: Callable[[State], object], tmp_path: Path) -> None:
    state = _state()
    for zipped in (True, False):
        torch.save(wrap(state), tmp_path / "vit.pth", _use_new_zipfile_serialization=zipped)
        model = _vit(1)
        load_checkpoint(model, tmp_path / "vit.pth")
        assert _holds(model, state)


def test_tensors_that_are_left_out_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "remtta")
    save_file({"loss.w": torch.ones(3), **_under("net.", _state())}, tmp_path / "vit.safetensors")
    load_checkpoint(_vit(1), tmp_path / "vit.safetensors")
    assert "left out, as the model has no such weights: loss.w" in caplog.text


@pytest.mark.parametrize("family", ["swin", "swinv2"])
def test_an_earlier_swin_is_read_without_its_buffers(family: str, tmp_path: Path) -> None:
    state: Any = tiny(family, seed=1).state_dict()
    renamed = [(re.sub(r"s\.(\d)\.down", lambda m: f"s.{int(m[1]) - 1}.down", name), state[name]) for name in state]
    earlier = {name.replace("head.fc.", "head."): tensor for name, tensor in renamed}
    buffers = _under(
        "layers.0.blocks.0.attn.", {"relative_position_index": torch.ones(4, 4), "attn_mask": torch.ones(2)}
    )
    for saved in (earlier, state):
        save_file({**saved, **buffers}, tmp_path / "swin.safetensors")
        load_checkpoint(model := tiny(family), tmp_path / "swin.safetensors")
        assert _holds(model, state)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu])
def test_weights_in_8_bits_are_widened(dtype: torch.dtype, tmp_path: Path) -> None:
    state = {name: tensor.to(dtype) for name, tensor in _state().items()}
    save_file(state, tmp_path / "vit.safetensors")
    load_checkpoint(model := _vit(1), tmp_path / "vit.safetensors")
    assert _holds(model, {name: tensor.float() for name, tensor in state.items()})


def _timm_training_checkpoint(path: Path, state: State, averaged: dict[str, State], **options: Any) -> None:
    args = argparse.Namespace(lr=1e-3, **{"mean": None, "interpolation": "", "model_kwargs": {"depth": 3}, **options})
    optimizer = {"state": {0: {"step": torch.ones(()), "exp_avg": torch.ones(3)}}, "param_groups": [{"lr": 1e-3}]}
    content = {"epoch": 7, "arch": "vit_tiny_patch16_224", "state_dict": state, "optimizer": optimizer}
    content |= {"version": 2, "args": args, "metric": 71.2, "amp_scaler": {"scale": 65536.0, "growth_interval": 2000}}
    torch.save({**content, **averaged}, path)


@pytest.mark.parametrize(
    ("averaged", "options", "expected"),
    [
        ("model_ema", {}, {}),
        ("state_dict_ema", {"mean": [0.4], "std": [0.1, 0.2, 0.3]}, {"mean": (0.4,) * 3, "std": (0.1, 0.2, 0.3)}),
        ("state_dict_ema", {"interpolation": "bilinear"}, {"interpolation": "bilinear"}),
        ("ema", {"mean": [123.7, 116.3, 103.5]}, {}),  # another script's
    ],
)
def test_a_timm_training_checkpoint_gives_the_weights_asked_for_and_the_preprocessing_it_was_given(
    averaged: str, options: Any, expected: Any, tmp_path: Path
) -> None:
    states = _state(2), _state(3)
    _timm_training_checkpoint(tmp_path / "last.pth.tar", states[0], {averaged: states[1]}, **options)
    for use_ema, state in zip((False, True), states, strict=True):
        model = _vit(1)
        assert load_checkpoint(model, tmp_path / "last.pth.tar", use_ema=use_ema) == expected
        assert _holds(model, state)


KINDS: dict[str, Callable[[Path], object]] = {
    "last.pth.tar": lambda path: _timm_training_checkpoint(path, _state(), {}),
    "vit.safetensors": lambda path: save_file(_state(), path),
    "vit.npz": lambda path: np.savez(path, **_google_arrays(_vit())),
}


@pytest.mark.parametrize("name", KINDS)
def test_averaged_weights_that_are_not_there_are_refused(name: str, tmp_path: Path) -> None:
    KINDS[name](tmp_path / name)
    with pytest.raises(CheckpointError, match=r"holds no averaged weights.*; drop --use-ema"):
        load_checkpoint(_vit(1), tmp_path / name, use_ema=True)


def _google_arrays(vit: nn.Module, prefix: str = "") -> dict[str, Any]:
    """A one-block ViT in the layout of Google's releases: kernels are (in, out), heads have their own axis."""
    weights = {name: tensor.numpy() for name, tensor in vit.state_dict().items()}
    width, heads = 12, 3
    block = "Transformer/encoderblock_0/"
    arrays = {
        "embedding/kernel": weights["patch_embed.proj.weight"].transpose(2, 3, 1, 0),
        "embedding/bias": weights["patch_embed.proj.bias"],
        "cls": weights["cls_token"],
        "Transformer/posembed_input/pos_embedding": weights["pos_embed"],
        "Transformer/encoder_norm/scale": weights["norm.weight"],
        "Transformer/encoder_norm/bias": weights["norm.bias"],
        "head/kernel": weights["head.weight"].T,
        "head/bias": weights["head.bias"],
    }
    for theirs, ours in (("LayerNorm_0", "norm1"), ("LayerNorm_2", "norm2")):
        arrays[f"{block}{theirs}/scale"] = weights[f"blocks.0.{ours}.weight"]
        arrays[f"{block}{theirs}/bias"] = weights[f"blocks.0.{ours}.bias"]
    attention = f"{block}MultiHeadDotProductAttention_1"
    for position, name in enumerate(("query", "key", "value")):
        rows = slice(position * width, (position + 1) * width)
        arrays[f"{attention}/{name}/kernel"] = weights["blocks.0.attn.qkv.weight"][rows].T.reshape(width, heads, -1)
        arrays[f"{attention}/{name}/bias"] = weights["blocks.0.attn.qkv.bias"][rows].reshape(heads, -1)
    arrays[f"{attention}/out/kernel"] = weights["blocks.0.attn.proj.weight"].T.reshape(heads, -1, width)
    arrays[f"{attention}/out/bias"] = weights["blocks.0.attn.proj.bias"]
    for number in (0, 1):
        arrays[f"{block}MlpBlock_3/Dense_{number}/kernel"] = weights[f"blocks.0.mlp.fc{number + 1}.weight"].T
        arrays[f"{block}MlpBlock_3/Dense_{number}/bias"] = weights[f"blocks.0.mlp.fc{number + 1}.bias"]
    return {prefix + name: np.ascontiguousarray(array) for name, array in arrays.items()}


@pytest.mark.parametrize("prefix", ["", "opt/target/"])
def test_every_weight_of_a_google_release_arrives_exactly(prefix: str, tmp_path: Path) -> None:
    source = _vit()
    np.savez(tmp_path / "vit.npz", **_google_arrays(source, prefix))
    model = _vit(1)
    load_checkpoint(model, tmp_path / "vit.npz")
    assert _holds(model, dict(source.state_dict()))
    assert checkpoint_dtypes(model, tmp_path / "vit.npz") == {}


class _Runs:
    """Unpickling this makes a folder: the harmless stand-in for code that does harm."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize("how", ["zip", "legacy", "pickle"])
def test_code_in_a_checkpoint_is_refused_and_not_run(how: str, tmp_path: Path) -> None:
    marker, path = tmp_path / "marker", tmp_path / "vit.pth"
    if how == "pickle":
        path.write_bytes(pickle.dumps(_Runs(marker), protocol=2))
    else:
        content = {"state_dict": _state(), "epoch": _Runs(marker)}
        torch.save(content, path, _use_new_zipfile_serialization=how == "zip")
    text = _refusal(path)
    assert not marker.exists()
    assert "holds more than weights" in text
    assert "could run code, so it was not loaded; save it again with torch.save(model.state_dict(), ...)" in text
    assert how != "zip" or f"({os.mkdir.__module__}.mkdir)" in text


def test_weights_far_larger_than_their_file_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"head.bias": torch.zeros(1).expand(2**29)}, path := tmp_path / "vit.pth")
    assert "its weights would take 2,048 MiB, but the file has only 0.0 MiB" in _refusal(path)
    torch.save(_state(), path)
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as file:
        file.writestr("zeros", bytes(2**23))
    monkeypatch.setattr(checkpoints, "most_bytes", lambda file_bytes: 2**23)
    assert "its weights would take 8 MiB" in _refusal(path)
    np.savez_compressed(path := tmp_path / "vit.npz", zeros=np.zeros(2**20))
    assert "its weights would take 8 MiB" in _refusal(path)


def test_a_file_of_far_too_many_tensors_is_refused_before_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = '"%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    header = ("{" + ",".join(entry % number for number in range(90_000)) + "}").encode()
    (tmp_path / "vit.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b" ")
    assert "its header has 5 MiB, more than the tensors of a model need" in _refusal(tmp_path / "vit.safetensors")
    monkeypatch.setattr(checkpoints, "_MAX_MEMBERS", 20)
    torch.save(_state(), tmp_path / "vit.pth")
    assert re.search(r"was not loaded: it holds \d+ tensors", _refusal(tmp_path / "vit.pth"))


def test_pickled_arrays_in_a_google_release_are_refused_and_not_run(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    arrays = {**_google_arrays(_vit()), "head/bias": np.array([_Runs(marker)], dtype=object)}
    np.savez(tmp_path / "vit.npz", **arrays)
    assert "allow_pickle=False" in _refusal(tmp_path / "vit.npz")
    assert not marker.exists()


def test_another_number_of_classes_is_named_for_any_head(tmp_path: Path) -> None:
    save_file(tiny("resnet", num_classes=9).state_dict(), tmp_path / "net.safetensors")
    with pytest.raises(CheckpointError, match="the file has 9 classes: see --num-classes"):
        load_checkpoint(tiny("resnet"), tmp_path / "net.safetensors")


def test_counters_of_batch_norms_may_be_missing(tmp_path: Path) -> None:
    saved, model = tiny("resnet", seed=1), tiny("resnet")
    state = {name: tensor for name, tensor in saved.state_dict().items() if not name.endswith("num_batches_tracked")}
    save_file(state, tmp_path / "net.safetensors")
    load_checkpoint(model, tmp_path / "net.safetensors")
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in state.items())


@pytest.mark.parametrize(
    ("changes", "size"),
    [
        ({}, (24, 40)),
        ({"reg_tokens": 2}, 48),
        ({"reg_tokens": 2, "no_embed_class": True}, 48),
        ({"pos_embed": "none"}, 48),
    ],
    ids=str,
)
def test_position_embeddings_are_resampled_as_timm_does(
    changes: dict[str, Any], size: int | tuple[int, int], tmp_path: Path
) -> None:
    state = _state(**changes)
    torch.save(state, tmp_path / "vit.pth")
    model, plain = _vit(1, img_size=size, **changes), _vit(2, img_size=size, **changes)
    load_checkpoint(model, tmp_path / "vit.pth")
    plain.load_state_dict(checkpoint_filter_fn(state, plain))
    assert _holds(model, dict(plain.state_dict()))
    if not changes:
        assert torch.equal(model.state_dict()["pos_embed"][:, 0], state["pos_embed"][:, 0])  # the class token's stays


def test_those_of_a_model_with_rotary_positions_are_too(tmp_path: Path) -> None:
    small = {"patch_size": 8, "embed_dim": 48, "depth": 1, "num_heads": 3, "num_classes": 7}
    eva = [timm.create_model("eva02_base_patch16_clip_224", img_size=size, **small) for size in (32, 48, 48)]
    save_file(eva[0].state_dict(), tmp_path / "eva.safetensors")
    load_checkpoint(eva[1], tmp_path / "eva.safetensors")
    eva[2].load_state_dict(eva_filter(dict(eva[0].state_dict()), eva[2]))
    assert _holds(eva[1], dict(eva[2].state_dict()))


def _facebook_dinov2(state: State) -> State:
    """Give a ViT Facebook's names: the class token's position is among the others, also with registers."""
    made = dict(state)
    if "reg_token" in made:
        position = torch.ones(1, 1, made["cls_token"].shape[2])
        made["register_tokens"] = made.pop("reg_token")
        made |= {
            "cls_token": made["cls_token"] - position,
            "pos_embed": torch.cat([position, made["pos_embed"]], 1),
        }
        return made  # without a mask token, as when saved for prediction only
    return {**made, "mask_token": torch.zeros(1, 12)}


def _swiglu_dinov2(state: State) -> State:
    names = {name: name.replace("mlp.fc1", "mlp.w12").replace("mlp.fc2", "mlp.w3") for name in state}
    return {**{new: state[name] for name, new in names.items()}, "mask_token": torch.zeros(1, 12)}


def _microsoft_beit(state: State) -> State:
    index = {"blocks.0.attn.relative_position_index": torch.zeros(17, 17, dtype=torch.long)}
    return {**state, **index, "mask_token": torch.zeros(1, 1, 48)}


def _facebook_convnext(state: State) -> State:
    """Give a ConvNeXt Facebook's names, which has its layers' parameters in other shapes, too."""
    rules = (
        (r"^stem\.", "downsample_layers.0."),
        (r"^stages\.(\d)\.downsample\.", r"downsample_layers.\1."),
        (r"^stages\.(\d)\.blocks\.", r"stages.\1."),
        ("conv_dw", "dwconv"),
        (r"mlp\.grn\.weight", "grn.gamma"),
        (r"mlp\.grn\.bias", "grn.beta"),
        (r"mlp\.fc", "pwconv"),
        (r"^head\.norm\.", "norm."),
        (r"^head\.fc\.", "head."),
    )
    made = renamed(state, rules)
    return {name: w.view(1, 1, 1, -1) if "grn" in name else w for name, w in made.items()}


def _facebook_dinov3(state: State) -> State:
    rules = (("gamma_([12])", r"ls\1.gamma"), ("reg_token", "storage_tokens"))
    more = {"blocks.0.attn.qkv.bias": torch.zeros(144), "rope_embed.periods": torch.ones(4)}
    return {**renamed(state, rules), **more, "mask_token": torch.zeros(1, 48)}


SMALL = {"img_size": 32, "patch_size": 8, "depth": 1, "num_classes": 7}
CONVNEXT: dict[str, Any] = {"depths": (1, 1, 2, 1), "dims": (8, 12, 16, 20), "num_classes": 7}
ORIGINALS: dict[str, tuple[str, dict[str, Any], Callable[[State], State]]] = {
    "DINOv2": ("vit_small_patch14_dinov2", {**SMALL, "embed_dim": 12, "num_heads": 3}, _facebook_dinov2),
    "registers": ("vit_small_patch14_reg4_dinov2", {**SMALL, "embed_dim": 12, "num_heads": 3}, _facebook_dinov2),
    "SwiGLU": ("vit_giant_patch14_dinov2", {**SMALL, "embed_dim": 12, "num_heads": 3}, _swiglu_dinov2),
    "DeiT III": (
        "deit3_small_patch16_224",
        {**SMALL, "embed_dim": 12, "num_heads": 3},
        lambda state: renamed(state, [(r"ls([12])\.gamma", r"gamma_\1")]),
    ),
    "BEiT": ("beit_base_patch16_224", {**SMALL, "embed_dim": 48, "num_heads": 3}, _microsoft_beit),
    "DINOv3": ("vit_small_patch16_dinov3", {**SMALL, "embed_dim": 48, "num_heads": 3}, _facebook_dinov3),
    "ConvNeXt": ("convnext_tiny", CONVNEXT, _facebook_convnext),
    "ConvNeXt V2": ("convnextv2_tiny", CONVNEXT, _facebook_convnext),
}
"""Model, its arguments, and the function that gives its weights the names of who trained it."""


@pytest.mark.parametrize("prefix", ["", "module.", "backbone."])
@pytest.mark.parametrize("kind", ORIGINALS)
def test_the_names_of_who_trained_a_model_are_converted_by_timm(
    kind: str, prefix: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    name, kwargs, original = ORIGINALS[kind]
    torch.manual_seed(1)
    source, model = (timm.create_model(name, **kwargs) for _ in range(2))
    expected = {key: torch.randn_like(w) for key, w in source.state_dict().items()}
    saved = original(dict(expected))
    if prefix == "backbone.":  # with a classifier beside it
        saved = {key.replace("head.", "fc.") if key[:5] == "head." else prefix + key: w for key, w in saved.items()}
    else:
        saved = _under(prefix, saved)
    torch.save(saved, tmp_path / "original.pth")
    load_checkpoint(model, tmp_path / "original.pth")
    torch.testing.assert_close(dict(model.state_dict()), expected)
    assert capfd.readouterr().out == ""


def _beside(name: str, more: State | None = None) -> Callable[[State, str], State]:
    """Return a function that puts a model's classifier under this name beside its other weights."""

    def save(state: State, head: str) -> State:
        inner = {f"net.backbone.{key}": w for key, w in state.items() if not key.startswith(f"{head}.")}
        outer = {key.replace(head, f"net.{name}", 1): w for key, w in state.items() if key.startswith(f"{head}.")}
        return {**inner, **outer, **(more or {})}

    return save


@pytest.mark.parametrize("name", ["head", "fc", "classifier.1", "linear_head"])
@pytest.mark.parametrize(("family", "head"), [("resnet", "fc"), ("swin", "head.fc"), ("efficientnet", "classifier")])
def test_a_classifier_beside_the_other_weights_is_found(family: str, head: str, name: str, tmp_path: Path) -> None:
    expected: State = dict(tiny(family, seed=1).state_dict())
    torch.save(_beside(name)(expected, head), tmp_path / "net.pth")
    load_checkpoint(model := tiny(family), tmp_path / "net.pth")
    assert _holds(model, expected)


def test_a_classifier_of_several_layers_is_not_taken_apart(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "remtta")
    saved = _beside("head.1", {"net.head.0.weight": torch.ones(12), "net.head.0.bias": torch.ones(12)})
    torch.save(saved(_state(), "head"), tmp_path / "vit.pth")
    assert "missing in the file: head.weight, head.bias" in _refusal(tmp_path / "vit.pth")
    assert "left out, as the model has no such weights: head." in caplog.text


def test_what_timm_resizes_is_named_and_another_patch_size_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "remtta")
    save_file(_state(), tmp_path / "vit.safetensors")
    load_checkpoint(_vit(1, img_size=48), tmp_path / "vit.safetensors")
    assert "converted by timm to the model's shape: pos_embed" in caplog.text
    assert "patch_embed.proj.weight is 12x3x" in _refusal(tmp_path / "vit.safetensors", patch_size=16)


def test_relative_positions_of_another_input_size_are_resized_as_timm_does(tmp_path: Path) -> None:
    small, large, plain = (
        timm.create_model("beit_base_patch16_224", **SMALL | {"img_size": size}, embed_dim=48, num_heads=3)
        for size in (32, 48, 48)
    )
    save_file(small.state_dict(), tmp_path / "beit.safetensors")
    load_checkpoint(large, tmp_path / "beit.safetensors")
    with warnings.catch_warnings(action="ignore"):  # torch's, at timm's interpolation
        plain.load_state_dict(beit_filter(dict(small.state_dict()), plain))
    assert _holds(large, dict(plain.state_dict()))


@pytest.mark.parametrize("name", ["weight_scale", "weight_scale_inv", "scale_weight", "scale"])
def test_scaled_weights_in_8_bits_are_refused(name: str, tmp_path: Path) -> None:
    state = {key: tensor.to(torch.float8_e4m3fn) for key, tensor in _state().items()}
    save_file({**state, f"blocks.0.attn.qkv.{name}": torch.ones(1)}, tmp_path / "vit.safetensors")
    text = _refusal(tmp_path / "vit.safetensors")
    assert f"8-bit weights with scales (blocks.0.attn.qkv.{name}), which remtta does not apply; multiply them" in text


Write = Callable[[Path], object]


def _half_of(write: Write) -> Write:
    return lambda path: [write(path), path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])]


def _saved(content: object) -> Write:
    return lambda path: torch.save(content, path)


def _with_head(change: Callable[[Tensor], Tensor]) -> Write:
    return lambda path: torch.save({**_state(), "head.weight": change(_state()["head.weight"])}, path)


def _renamed(path: Path) -> None:
    state = _state()
    save_file({"neck.weight": state.pop("norm.weight"), **state}, path)


def _scripted(path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is deprecated
        torch.jit.script(nn.LayerNorm(2)).save(path)


FIVE = (
    "does not fit the model: head.weight is 7x12 in the file and 5x12 in the model, "
    "head.bias is 7 in the file and 5 in the model (the file has 7 classes: see --num-classes)"
)
OTHER_SIZES = "has other names, or is incomplete; cls_token is 1x1x12 in the file and 1x1x24 in the model"
MISSING = "missing in the file: blocks.1.norm1.weight, blocks.1.norm1.bias, blocks.1.attn.qkv.weight and 9 more"
NO_GOOGLE = "nothing usable for head.weight, head.bias (see --num-classes and --model)"
CONTENTS: list[tuple[str, bytes, str]] = [
    ("vit.pth", b"", " is not a readable PyTorch checkpoint: it is empty"),
    ("vit.pt", b"version https://git-lfs.github.com/spec/v1\n", "it starts with b'version https://'"),
    ("vit.pth", b"PK\x03\x04 cut off", " is not a readable PyTorch checkpoint: "),
    ("vit.safetensors", b"hello, this is text", " is not a readable safetensors file: "),
    ("vit.npz", b"hello\n", " is not a readable .npz file"),
]
SAFE, GOOGLE = KINDS["vit.safetensors"], KINDS["vit.npz"]
REFUSED: list[tuple[str, Write, dict[str, Any], str]] = [
    *((name, partial(Path.write_bytes, data=content), {}, told) for name, content, told in CONTENTS),
    *((name, _half_of(write), {}, " is not a readable") for name, write in KINDS.items()),
    ("vit.npz", GOOGLE, {"num_classes": 5}, NO_GOOGLE),
    ("vit.npz", GOOGLE, {"depth": 2}, "does not fit the model"),
    ("vit.npz", GOOGLE, {"qk_norm": True}, "and 1 more (see --num-classes and --model)"),
    ("vit.safetensors", SAFE, {"num_classes": 5}, FIVE),
    ("vit.safetensors", SAFE, {"embed_dim": 24, "num_classes": 7}, OTHER_SIZES),
    ("vit.safetensors", SAFE, {"depth": 2}, MISSING),
    (
        "vit.pth",
        lambda path: torch.save(_state(img_size=(16, 40)), path),
        {},
        "its patches form no square: give the size it was trained at, such as --input-size 20 32",
    ),
    ("vit.safetensors", _renamed, {}, "missing in the file: norm.weight; unknown to the model: neck.weight"),
    ("vit.pth", _saved([1, 2]), {}, "holds list instead of named weights"),
    ("vit.pth", _saved({}), {}, "holds dict instead of named weights"),
    ("vit.pth", _saved({"epoch": 3}), {}, "holds int at 'epoch' instead of named weights; save the model's state"),
    ("vit.pt", _scripted, {}, " is not a readable PyTorch checkpoint: it is a TorchScript program; save its state"),
    ("vit.pth", _saved({"model": {"a": [1.0]}}), {}, "holds dict at 'model' instead of named weights"),
    (
        "vit.pth",
        _with_head(lambda t: t.view(torch.uint8).view(torch.float4_e2m1fn_x2)),
        {},
        "; save it in 16 or 32 bits",
    ),
    ("vit.pth", lambda path: torch.save(_state(global_pool="avg"), path), {}, ": add --model-kwargs global_pool=avg"),
    ("vit.pth", _with_head(lambda t: t.to(torch.complex64)), {}, "as torch.complex64; remtta takes weights in"),
    ("vit.pth", _with_head(lambda t: t / 0), {}, "holds values in head.weight that are not finite numbers"),
    ("odd.pth", _with_head(Tensor.to_sparse), {}, "odd.pth"),
    ("vit.pth", _with_head(lambda t: t.to("meta")), {}, "as a sparse, quantised or empty tensor; save plain weights"),
]


@pytest.mark.parametrize(("name", "write", "changes", "told"), REFUSED)
def test_what_does_not_fit_is_refused_in_a_line(
    name: str, write: Write, changes: dict[str, Any], told: str, tmp_path: Path
) -> None:
    write(tmp_path / name)
    text = _refusal(tmp_path / name, **changes)
    assert told in text and ("--num-classes" in text) == ("num-classes" in told)
