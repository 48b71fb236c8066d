"""The models that a delta's header may ask for."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from remtta import Delta, adapt_stream, apply_delta, load_base, load_delta, load_model, save_delta
from remtta.deltas.base_model import base_options
from remtta.errors import DeltaError, UsageError
from remtta.models.tensor_files import state_sha256
from remtta.options import ModelOptions
from tests.conftest import NUM_CLASSES, TINY

NAME = "vit_tiny_patch16_224"


def saved(folder: Path, model: str = NAME, preprocessing: dict[str, Any] | None = None, **options: Any) -> Delta:
    """A delta from a file whose header says this."""
    folder.mkdir(exist_ok=True)
    path = folder / "delta.safetensors"
    delta = Delta({"norm.weight": torch.ones(48)}, model, "ab" * 32, "rem", model_options=options)
    save_delta(path, replace(delta, preprocessing=preprocessing or {}))
    return load_delta(path)


def test_sizes_of_the_model_are_taken_from_the_header(tmp_path: Path) -> None:
    delta = saved(tmp_path, num_classes=7, model_kwargs={**TINY, "qkv_bias": True, "global_pool": "token"})
    arguments = base_options(delta, ModelOptions(NAME, "mine.safetensors"))
    assert arguments.model_kwargs == {**TINY, "qkv_bias": True, "global_pool": "token"}
    assert (arguments.num_classes, arguments.checkpoint) == (7, "mine.safetensors")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model_kwargs": {"pretrained_cfg_overlay": {"url": "http://127.0.0.1/x"}}}, "set: pretrained_cfg"),
        ({"model_kwargs": {"cache_dir": "/tmp/x"}}, "a file may not set: cache_dir"),
        ({"model_kwargs": {"img_size": [1, 2, 3]}}, "a file may not set: img_size"),
        ({"model_kwargs": {"global_pool": "/etc"}}, "a file may not set: global_pool"),
        ({"model_kwargs": [1]}, "model arguments that are not a mapping"),
        ({"num_classes": 10**9}, "absurd number of classes"),
        ({"num_classes": 2.5}, "absurd number of classes"),
        ({"input_size": [99999, 32]}, "absurd input size"),
        ({"input_size": 5}, "absurd input size"),
        ({"input_size": [None, None]}, "absurd input size"),
        *(({"preprocessing": each}, "preprocessing") for each in ({"mean": [*"abc"]}, {"std": 1}, {"crop_pct": "x"})),
        ({"foo": 1}, "unknown model options: foo"),
    ],
)
def test_a_header_that_asks_for_too_much_is_refused_before_anything_is_built(
    options: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    delta = saved(tmp_path, **options)
    monkeypatch.setattr("remtta.deltas.base_model.load", lambda _: pytest.fail("something was built"))
    with pytest.raises(DeltaError, match=message):
        load_base(delta, checkpoint="mine.safetensors")


DOWNLOADS = [NAME, "hf-hub:somebody/something", "vit_tiny_patch16_224.augreg_in21k_ft_in1k"]


@pytest.mark.parametrize(
    ("header", "own", "told"),
    [
        ({"model": ""}, None, "header holds no model"),
        *(({"model": name}, None, "add --model to allow their download") for name in DOWNLOADS[::2]),
        ({"model": DOWNLOADS[1]}, None, "add --model to allow it to be loaded$"),
        ({"model": "local-dir:."}, "mine.safetensors", "add --model to allow it to be loaded$"),
        ({"checkpoint": "/etc/x.pth"}, None, "the weights in '/etc/x.pth'; name them with --checkpoint"),
    ],
)
def test_nothing_is_downloaded_or_opened_without_the_users_own_word(
    header: dict[str, Any], own: str | None, told: str, tmp_path: Path
) -> None:
    with pytest.raises((DeltaError, UsageError), match=told):
        base_options(saved(tmp_path, **header), ModelOptions(checkpoint=own))


def test_what_the_user_names_or_is_embedded_is_taken(tmp_path: Path) -> None:
    for model in DOWNLOADS:
        assert base_options(saved(tmp_path, model=model), ModelOptions(model)).name == model
    assert base_options(saved(tmp_path, model="remtta-demo")).name == "remtta-demo"


def test_the_checkpoint_of_a_run_is_the_one_that_its_record_names(
    checkpoint: Path, frames: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"num_classes": NUM_CLASSES, "model_kwargs": TINY}
    model = load_model(NAME, checkpoint=checkpoint, **options)
    adapt_stream(model, frames, tmp_path / "run", method="rem")  # whose delta is all in the model
    adapted = state_sha256(model)
    for place in (tmp_path / "run", tmp_path / "run" / "delta.safetensors"):
        base = load_base(load_delta(place), device="cpu")
        apply_delta(base, load_delta(place))
        assert state_sha256(base) == adapted
    record = tmp_path / "run" / "run.json"
    content = json.loads(record.read_text())
    for changes in ({"checkpoint": "/dev/zero"}, {"checkpoint": "http://a/b.pth"}, {"base_sha256": "0" * 64}):
        record.write_text(json.dumps({**content, "model": {**content["model"], **changes}}))
        with pytest.raises(UsageError, match="name them with --checkpoint"):
            base_options(load_delta(tmp_path / "run"))
    for damaged in ("[]", '{"model": "x"}', "{", "[" * 100_000):
        record.write_text(damaged)
        with pytest.raises(UsageError, match="name them with --checkpoint"):
            base_options(load_delta(tmp_path / "run"))


@pytest.mark.parametrize(
    "damage", [lambda c: c[:-2] + bytes([c[-2] ^ 1]) + c[-1:], lambda c: c.replace(b'"frames":"0"', b'"frames":"9"')]
)
def test_a_flipped_bit_or_a_changed_header_is_noticed(damage: Callable[[bytes], bytes], tmp_path: Path) -> None:
    saved(tmp_path)
    path = tmp_path / "delta.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DeltaError, match="its content does not match its checksum"):
        load_delta(path)
