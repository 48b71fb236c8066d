"""Frames of a video that are predicted, but not learned from."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from remtta import REM, REMConfig, load_delta
from remtta.errors import FrameError
from remtta.models.preprocessing import preprocessing_of
from remtta.options import GuardOptions
from remtta.pipeline.harm import HarmDetector
from remtta.runs.folder import PREDICTIONS
from remtta.runs.summary import RunSummary
from remtta.streams.frames import Frame
from remtta.streams.sources import Stream
from tests.conftest import draw_image, raising, tiny_vit
from tests.records import record_of, rows_of
from tests.runs.tiny import adapt_tiny

pytestmark = pytest.mark.usefixtures("no_thread_is_left")


BLACK, DUPLICATE = "black frame", "duplicate of the frame before"


def go(stream: Stream, folder: Path, method: str = "rem", *, resume: bool = False, **options: Any) -> RunSummary:
    options = {"logits": True, "guard": GuardOptions("rollback"), **options}
    return adapt_tiny(stream, folder, method, resume=resume, options=options)


def video(*images: Image.Image | Callable[[], Image.Image] | None) -> Stream:
    """A video of these frames, or of what loads them; None is a black one."""

    def frames() -> Iterator[Frame]:
        for number, image in enumerate(images):
            shown = image or Image.fromarray(np.random.default_rng(number).integers(0, 3, (36, 40, 3), dtype=np.uint8))
            load = shown if callable(shown) else partial(lambda image: image, shown)
            yield Frame("clip.mp4", load, number, 0.1 * number)

    return Stream("clip.mp4", "video", frames())


a, b, c, d, e = (draw_image(seed) for seed in range(5))
refuse = raising(FrameError("broken"))


@pytest.mark.parametrize("guard", [None, GuardOptions("rollback")])
def test_black_and_repeated_frames_are_predicted_but_change_no_weights(
    guard: GuardOptions | None, tmp_path: Path
) -> None:
    go(video(a, None, None, b, b, c, c, c, d), tmp_path / "run", batch_size=4, guard=guard)
    rows = rows_of(tmp_path / "run")
    reasons = [None, BLACK, BLACK, None, DUPLICATE, None, DUPLICATE, DUPLICATE, None]
    assert [row.get("not_adapted") for row in rows] == reasons
    assert [row["adapted"] for row in rows] == [reason is None for reason in reasons]
    assert [row["update"] for row in rows] == [0] * 4 + [1] * 4 + [2]

    model = tiny_vit()
    rem, preprocessing = REM(model, REMConfig(lr=0.01)), preprocessing_of(model)
    transform = preprocessing.transform()

    def pixels(*images: Image.Image) -> torch.Tensor:
        return preprocessing.normalise(torch.stack([transform(image) for image in images]))

    first = rem(pixels(a, b))
    second = rem.predict(pixels(b, c), update=False).logits
    rem(pixels(c))
    third = rem(pixels(d))
    found = torch.tensor([row["logits"] for row in rows])
    torch.testing.assert_close(found[[0, 3]], first, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found[[4, 5]], second, rtol=1e-4, atol=1e-4)  # from before the update on c
    torch.testing.assert_close(found[[8]], third, rtol=1e-4, atol=1e-4)
    delta = load_delta(tmp_path / "run")
    assert (delta.frames, delta.updates) == (4, 3)
    torch.testing.assert_close(delta.tensors, rem.delta(), rtol=1e-3, atol=1e-6)
    assert record_of(tmp_path / "run")["counts"]["not_adapted"] == 5


def stills(*images: Image.Image) -> Stream:
    frames = (Frame(f"{number}.png", partial(image.copy)) for number, image in enumerate(images))
    return Stream("stills", "folder", frames)


def grey(level: int, *, lamp: int = 0) -> Image.Image:
    pixels = np.full((32, 32, 3), level, np.uint8)
    pixels[10:14, 10:14] += np.uint8(lamp)
    return Image.fromarray(pixels)


@pytest.mark.parametrize(
    ("stream", "method", "adapted"),
    [
        (partial(video, None, None, None, a, a, a), "rem", [False] * 3 + [True] + [False] * 2),
        (partial(video, grey(0, lamp=120), grey(4)), "rem", [True] * 2),  # a mean below 2, but a lamp is to be seen
        (partial(stills, a, a, grey(0)), "rem", [True] * 3),
        (partial(video, a, a, None), "source", [False] * 3),
    ],
    ids=["a batch without a fit frame", "dark frames that show something", "stills", "a method that never adapts"],
)
def test_what_is_learned_from(stream: Callable[[], Stream], method: str, adapted: list[bool], tmp_path: Path) -> None:
    summary = go(stream(), tmp_path, method)
    rows = rows_of(tmp_path)
    assert [row["adapted"] for row in rows] == adapted
    assert ["not_adapted" in row for row in rows] == [method == "rem" and not each for each in adapted]
    assert summary.num_updates == any(adapted)
    assert method == "source" or load_delta(tmp_path).frames == sum(adapted)


@pytest.mark.parametrize(
    ("images", "stop", "adapt_for"),
    [
        ([a, b, c, c, d, d, e], 3, None),
        ([a, b, c, refuse, refuse, refuse, c, d, d], 3, None),
        ([a, b, c, d, e, a, b], 6, 1),
    ],
    ids=["learning", "unreadable", "frozen"],
)
def test_a_resumed_run_still_knows_the_frame_before(
    images: list[Any], stop: int, adapt_for: int | None, tmp_path: Path
) -> None:
    go(video(*images), tmp_path / "whole", adapt_for=adapt_for)
    go(video(*images[:stop]), tmp_path / "parts", adapt_for=adapt_for)
    go(video(*images), tmp_path / "parts", resume=True, adapt_for=adapt_for)
    whole, parts = ((tmp_path / name / PREDICTIONS).read_bytes() for name in ("whole", "parts"))
    assert parts == whole and whole.count(DUPLICATE.encode()) == (2 if adapt_for is None else 0)


@pytest.mark.parametrize("doubting", [True, False], ids=["into doubt", "out of doubt"])
def test_a_batch_is_predicted_by_one_model_where_the_guard_changes_its_mind(
    doubting: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def judge(detector: HarmDetector, *_: object) -> bool:
        detector.status.doubting = doubting
        return False

    monkeypatch.setattr(HarmDetector, "judge", judge)
    images = [a, b, c, c, d, None]
    go(video(*images), tmp_path / "guarded")
    monkeypatch.undo()
    go(video(*images), tmp_path / "plain", "source" if doubting else "rem", guard=None)
    rows, plain = (rows_of(tmp_path / name) for name in ("guarded", "plain"))
    got, wanted = (torch.tensor([row["logits"] for row in some]) for some in (rows, plain))
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    assert {row.get("answered_by") for row in rows} == {"source" if doubting else None}
