"""The micro-batch that `--max-memory` chooses."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from remtta import RunOptions, adapt_stream
from remtta.errors import UsageError
from remtta.methods import fitting
from remtta.methods.base import Center, LossOutput
from remtta.methods.fitting import fitting_micro_batch
from remtta.methods.rem import REM
from remtta.methods.settings.rem_config import REMConfig
from remtta.methods.table import method_config
from remtta.pipeline.pipeline import Pipeline
from tests.conftest import random_images, tiny_vit
from tests.methods.making import pipeline_of, predicted
from tests.records import record_of, rows_of

USED = 100 * 2**20


@pytest.fixture(autouse=True)
def _the_process_uses_a_hundred_mebibytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting, "resident_bytes", lambda: USED)


def build(name: str = "tent", **settings: Any) -> Pipeline:
    return pipeline_of(name, tiny_vit(depth=4), method_config(name, settings, batch_size=8))


def most_for(count: int, name: str = "tent") -> int:
    """Find the limit that lets `count` images of a batch of 8 fit, and not one more, by bisection."""
    low, high, method = USED, USED + 2**27, build(name).method
    while high - low > 2**13:
        middle = (low + high) // 2
        try:
            fits = fitting_micro_batch(method, (32, 32), 8, middle) or 8
        except UsageError:
            fits = 0
        low, high = (middle, high) if fits < count else (low, middle)
    return high


def test_an_image_takes_what_its_graph_holds_until_all_fit() -> None:
    width, hidden, tokens, depth = 48, 4 * 48, 65, 4
    # Per token and block: both norms' inputs, qkv, the attention's output, the MLP's hidden layer; and two statistics
    # for each norm, one for each head's softmax.
    block = tokens * (2 * width + 3 * width + width + hidden + 2 * 2 + 3)
    last = tokens * (width + 2 * width + 2)  # its first norm's input, its keys and values
    method = build().method
    elements = (depth - 1) * block + last + method.model.backbone.num_passing
    limits = [most_for(count) for count in (1, 2, 4)]
    steps = limits[1] - limits[0], (limits[2] - limits[1]) / 2
    assert steps == pytest.approx([1.5 * 4 * elements] * 2, rel=0.02)  # with half as much for the allocator
    assert fitting_micro_batch(method, (32, 32), 8, 2**40) is None


def test_too_little_for_one_image_is_reported_with_what_it_needs() -> None:
    with pytest.raises(UsageError, match=r"--max-memory 100M is not enough: one image at a time needs about 10\dM"):
        fitting_micro_batch(build().method, (32, 32), 8, USED)


def test_a_gibibyte_that_is_not_enough_is_reported_in_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting, "resident_bytes", lambda: 11 * USED)
    with pytest.raises(UsageError, match=r"--max-memory 1024M is not enough"):
        fitting_micro_batch(build().method, (32, 32), 8, 2**30)


@pytest.mark.parametrize("name", ["rem", "cotta", "vdp"])
def test_measuring_leaves_the_method_as_it_was(name: str) -> None:
    few = {"num_augmentations": 2} if name == "cotta" else {}
    measured, fresh = build(name, **few), build(name, **few)
    fitting_micro_batch(measured.method, (32, 32), 8, 2**40)
    assert measured.method.num_updates == 0
    for seed in range(2):
        torch.testing.assert_close(measured(random_images(8, seed)), fresh(random_images(8, seed)))


def go(frames: Path, output: Path, **options: Any) -> None:
    adapt_stream(
        tiny_vit(depth=4),
        frames,
        output,
        method="rem",
        config=REMConfig(lr=0.01),
        options=RunOptions(batch_size=8, **options),
    )


def test_a_run_keeps_to_it_and_gives_the_same(frames: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go(frames, tmp_path / "whole")
    limit = most_for(3, "rem")
    seen: list[int] = []
    loss = REM.loss

    def counted(self: REM, images: Tensor, center: Center, *targets: Tensor) -> LossOutput:
        seen.append(len(images))
        return loss(self, images, center, *targets)

    monkeypatch.setattr(REM, "loss", counted)
    go(frames, tmp_path / "parts", max_memory=limit)
    assert max(seen[2:]) == 3  # after the measuring
    record = record_of(tmp_path / "parts")
    assert record["method"]["micro_batch"] == 3 and record["options"]["max_memory"] == limit
    for whole, parts in zip(rows_of(tmp_path / "whole"), rows_of(tmp_path / "parts"), strict=True):
        assert whole["class"] == parts["class"]
        assert whole["entropy"] == pytest.approx(parts["entropy"], abs=1e-4)


def test_a_resumed_run_keeps_its_micro_batch(frames: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = most_for(3, "rem")
    go(frames, tmp_path / "run", max_memory=limit)
    monkeypatch.setattr(fitting, "resident_bytes", lambda: 2 * USED)  # nothing would fit now
    go(frames, tmp_path / "run", max_memory=limit, resume=True)
    record = record_of(tmp_path / "run")
    assert (record["resumed"], record["method"]["micro_batch"]) == (1, 3)


@pytest.mark.parametrize(("name", "told"), [("memo", "MEMO works on single images"), ("roid", "ROID works on whole")])
def test_methods_that_divide_no_batch_are_refused(name: str, told: str, frames: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=told):
        adapt_stream(tiny_vit(), frames, tmp_path / "run", method=name, options=RunOptions(max_memory=2**40))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["tent", "remtta", "cotta"])
def test_predictions_keep_to_the_micro_batch(name: str) -> None:
    model: Any = tiny_vit()
    sizes: list[int] = []
    model.patch_embed.register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[0])))
    split = pipeline_of(name, model, method_config(name, {"micro_batch": 2}, batch_size=6))
    predicted(split, random_images(6))
    split(random_images(6))
    assert max(sizes) == 2
