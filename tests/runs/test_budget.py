"""Updates are left out, never predictions, where there is no time for them, and for black and repeated frames."""

import itertools
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from remtta import REM, REMConfig, RunOptions, adapt_stream, load_delta
from remtta.errors import FrameError, UsageError
from remtta.models.preprocessing import preprocessing_of
from remtta.options import GuardOptions
from remtta.pipeline.prediction import Prediction
from remtta.runs.budget import TimeBudget
from remtta.runs.folder import PREDICTIONS
from remtta.runs.hints import RateCheck
from remtta.runs.latencies import Latencies
from remtta.runs.loop import BatchResult
from remtta.runs.summary import RunSummary
from remtta.streams.batches import Batch
from remtta.streams.frames import Frame, Gap
from remtta.streams.prefetch import DecodedFrame
from remtta.streams.sources import Stream
from tests.conftest import draw_image, draw_video, raising, tiny_vit
from tests.records import record_of, rows_of
from tests.runs.tiny import adapt_tiny


def batch(times: list[float | None]) -> list[DecodedFrame]:
    return [DecodedFrame(number, "clip", number, time_s, torch.zeros(1)) for number, time_s in enumerate(times)]


def shares(max_ms: float, update_s: float, predict_s: float, batches: int = 60) -> tuple[float, float]:
    """Share of adapted batches of 10 frames, and the mean time per frame in ms."""
    budget = TimeBudget(max_ms)
    frames, spent, adapted = batch([None] * 10), 0.0, 0
    for _ in range(batches):
        learn = budget.allows(frames)
        seconds = update_s if learn else predict_s
        budget.record(seconds, 10, adapted=learn)
        spent, adapted = spent + seconds, adapted + learn
    return adapted / batches, 1000 * spent / (10 * batches)


def test_the_mean_time_per_frame_is_kept_by_leaving_updates_out() -> None:
    assert shares(max_ms=120, update_s=1.0, predict_s=0.2) == pytest.approx((1.0, 100))
    share, mean_ms = shares(max_ms=60, update_s=1.0, predict_s=0.2)
    assert share == pytest.approx(0.5, abs=0.03) and mean_ms <= 62
    share, mean_ms = shares(max_ms=21, update_s=1.0, predict_s=0.2)
    assert 0 < share < 0.06 and mean_ms == pytest.approx(21, abs=2)


def test_early_predictions_use_up_the_time_for_updates(tmp_path: Path) -> None:
    """A pass takes 60 ms at least, and a batch of six frames has 240 ms: enough for a step of Tent, but not for five
    predictions of frames as they come and the step, 360 ms at least.
    """
    model = tiny_vit()
    model.register_forward_pre_hook(lambda *_: time.sleep(0.06))
    options = {"batch_size": 6, "max_ms": 40.0, "flush_after": 0.0, "guard": None}
    images = [draw_image(seed) for seed in range(12)]
    frames = (Frame(f"{number}.png", partial(image.copy)) for number, image in enumerate(images))
    adapt_tiny(Stream("stills", "folder", frames), tmp_path, "tent", model=model, options=options)
    rows = rows_of(tmp_path)
    assert [row.get("early", False) for row in rows] == [*[True] * 5, False] * 2
    assert [row.get("not_adapted") for row in rows if not row.get("early")] == [None, "out of time"]


def test_stills_have_no_times_to_keep_up_with(frames: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--realtime needs the times of a video or a live source, and"):
        adapt_stream(tiny_vit(), frames, tmp_path / "run", options=RunOptions(realtime=True))
    assert not (tmp_path / "run").exists()


def test_predictions_that_are_too_slow_alone_leave_no_update(caplog: pytest.LogCaptureFixture) -> None:
    share, mean_ms = shares(max_ms=5, update_s=1.0, predict_s=0.2)
    assert [record.getMessage() for record in caplog.records] == [
        "predictions alone take 20.0 ms per frame, which is over --max-ms 5: adaptation stops"
    ]
    assert share <= 1 / 60 and mean_ms < 22  # the first, before anything is known


Step = tuple[float, list[float | None], bool]
AHEAD: list[Step] = [(100, [0.0, 0.5, 1.0], True), (102, [2.0, 2.5, 3.0], True)]  # 2 s later it is 2 s further
AHEAD += [(104.9, [4.0, 4.5, 5.0], True)]  # 4.9 s later it is 4 s further: late by less than the second a batch lasts
AHEAD += [(107.1, [6.0, 6.5, 7.0], False)]
VIDEOS: list[Step] = [(2, [0.0, 1.0], True), (4, [2.0, 3.0], True), (6, [0.0, 1.0], True), (8, [2.0, 3.0], True)]
VIDEOS += [(10, [4.0, 0.0], True), (12, [1.0, 2.0], True), (15.5, [3.0, 4.0], False)]  # exactly in step, but the last
JITTER: list[Step] = [(0, [0.0], True), (0.102, [0.1], True), (0.198, [0.2], True), (0.39, [0.3], True)]
JITTER += [(0.51, [0.4], False)]  # of 0.1 s between two frames


@pytest.mark.parametrize("steps", [AHEAD, VIDEOS, JITTER], ids=["ahead", "anew with every video", "jitter"])
def test_realtime_adapts_only_while_the_stream_has_not_run_ahead(steps: list[Step]) -> None:
    now = 0.0
    budget = TimeBudget(realtime=True, clock=lambda: now)
    for now, times, allowed in steps:  # noqa: B007 - the clock reads it
        assert budget.allows(batch(times)) == allowed
    with pytest.raises(UsageError, match="have none"):
        budget.allows(batch([None, None]))
    broken = DecodedFrame(0, "clip", None, None, None, "is truncated")
    assert TimeBudget(realtime=True).allows([broken, *batch([0.0, 0.5])])  # goes by those that can be read


NONE = Prediction(torch.empty(0, 2), torch.empty(0, dtype=torch.bool))
PASSES = {"remtta": 4.2, "light": 2.0}


@pytest.mark.parametrize("realtime", [False, True])
def test_a_run_that_is_behind_its_video_learns_from_the_first_batch_only(
    realtime: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(0, 10**6, 60))
    monkeypatch.setattr("remtta.runs.run.TimeBudget", partial(TimeBudget, clock=lambda: next(clock)))
    options = RunOptions(batch_size=3, realtime=realtime)
    adapt_stream(tiny_vit(), draw_video(tmp_path / "clip.avi", range(9)), tmp_path / "run", options=options)
    rows = rows_of(tmp_path / "run")
    assert [row["adapted"] for row in rows] == [True] * 3 + [not realtime] * 6
    assert {row.get("not_adapted") for row in rows[3:]} == {"out of time" if realtime else None}


@pytest.mark.parametrize(
    ("method", "seconds", "told"),
    [
        (
            "remtta",
            0.7,
            "remtta can process 1.4 frames/s here, but the source delivers 2.0; --method remtta --adapt-",
        ),
        ("remtta", 1.8, "--method fast --latency --realtime would (about 2.3 frames/s)"),
        ("light", 3.0, "use a smaller model, or --frame-stride 18"),  # every third frame of a camera of 6
        ("a-plugin", 0.7, "use a smaller model, or --frame-stride 5"),
        ("remtta", 0.45, None),
    ],
)
@pytest.mark.parametrize("size", [1, 10])
def test_a_method_that_cannot_keep_up_with_a_camera_is_reported_once(
    method: str, seconds: float, told: str | None, size: int, caplog: pytest.LogCaptureFixture
) -> None:
    rate = RateCheck(method, PASSES.get(method, 0.0), stride=3)
    for step in range(0, 60, size):
        frames = [DecodedFrame(n, "0", 3 * n, n / 2, torch.zeros(1), read_at="now") for n in range(step, step + size)]
        rate.record(BatchResult(Batch(frames), NONE, seconds=(1 + (step == 0)) * seconds * size))
        rate.record(BatchResult(Batch(batch([0.0])), NONE, seconds=1e3))  # of a finite video
    assert [told in record.getMessage() for record in caplog.records if told] == [True] * bool(told)


@pytest.mark.parametrize(("seconds", "told"), [(0.45, False), (0.7, True)])
def test_frames_that_arrive_all_at_once_after_an_opening_do_not_count(
    seconds: float, told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    rate = RateCheck("remtta", 4.2, stride=1)
    times = [n / 1000 for n in range(28)] + [0.5 * n for n in range(1, 11)]
    times += [9 + n / 1000 for n in range(28)] + [9 + 0.5 * n for n in range(1, 30)]  # it was lost, and came back
    for number, time_s in enumerate(times):
        gap = Gap(4.0, "the connection ended", 1) if time_s == 9 else None
        frame = DecodedFrame(number, "0", number, time_s, torch.zeros(1), gap=gap, read_at="now")
        rate.record(BatchResult(Batch([frame]), NONE, seconds=seconds))
    assert len(caplog.messages) == told
    assert not told or "can process 1.4 frames/s here, but the source delivers 2.0; " in caplog.messages[0]


def test_a_run_that_skips_updates_is_reported_if_its_predictions_are_too_slow(caplog: pytest.LogCaptureFixture) -> None:
    rate = RateCheck("remtta", 4.2, stride=1, skips_updates=True)
    for number in range(60):
        frame = DecodedFrame(number, "0", number, number / 2, torch.zeros(1), read_at="now")
        adapted = number < 40
        seconds = 9.0 if adapted else 0.85
        rate.record(BatchResult(Batch([frame]), NONE, adapted=adapted, seconds=seconds))
        assert not (adapted and caplog.records)
    [told] = caplog.messages
    assert told.endswith(
        "can process 1.2 frames/s here, but the source delivers 2.0; use a smaller model, or --frame-stride 2"
    )


def test_latencies_are_reported_within_four_percent() -> None:
    latencies = Latencies()
    assert latencies.percentiles_ms() is None
    for milliseconds in range(1, 101):
        latencies.add(milliseconds / 1000, 2)
    assert latencies.percentiles_ms() == pytest.approx({"p50": 50, "p95": 95, "p99": 99}, rel=0.04)
    latencies.add(0.0, 200)
    latencies.add(1e9, 200)  # what is outside the range counts at its ends, 0.1 ms and 10,000 s
    assert latencies.percentiles_ms() == pytest.approx({"p50": 50, "p95": 1e7, "p99": 1e7}, rel=0.04)
    assert latencies.cumulative_counts([0.0002, 1000.0]) == [200, 400, 600]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        *(({"max_ms": value}, "max_ms must be > 0 and finite") for value in (0.0, -1.0, float("inf"), float("nan"))),
        ({"overwrite": True, "resume": True}, "choose one"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        RunOptions(**options)


def test_a_run_out_of_time_predicts_everything_and_adapts_once(frames: Path, tmp_path: Path) -> None:
    options = RunOptions(batch_size=4, max_ms=1e-3)
    summary = adapt_stream(tiny_vit(), frames, tmp_path / "run", config=REMConfig(lr=0.01), options=options)
    rows = rows_of(tmp_path / "run")
    assert summary.num_updates == 1  # the first batch says what an update takes
    assert len(rows) == 12 and [row["adapted"] for row in rows] == [True] * 4 + [False] * 8
    assert all(row["not_adapted"] == "out of time" for row in rows[4:])
    record = record_of(tmp_path / "run")
    assert record["counts"]["not_adapted"] == 8
    latency = record["timing"]["latency_ms"]
    assert 0 < latency["p50"] <= latency["p95"] <= latency["p99"]


pytestmark = pytest.mark.usefixtures("no_thread_is_left")


BLACK, DUPLICATE = "black frame", "duplicate of the frame before"


def go(
    stream: Stream,
    folder: Path,
    method: str = "rem",
    *,
    resume: bool = False,
    config: REMConfig | None = None,
    **options: Any,
) -> RunSummary:
    options = {"logits": True, "guard": GuardOptions("rollback"), **options}
    return adapt_tiny(stream, folder, method, resume=resume, options=options, config=config)


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
    images: list[Any], stop: int, adapt_for: int | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    go(video(*images), tmp_path / "whole", adapt_for=adapt_for)
    go(video(*images[:stop]), tmp_path / "parts", adapt_for=adapt_for)
    go(video(*images), tmp_path / "parts", resume=True, adapt_for=adapt_for)
    whole, parts = ((tmp_path / name / PREDICTIONS).read_bytes() for name in ("whole", "parts"))
    assert parts == whole and whole.count(DUPLICATE.encode()) == (2 if adapt_for is None else 0)
    assert "is it another video" not in caplog.text


def test_a_batch_is_predicted_by_one_model_where_the_guard_changes_its_mind(tmp_path: Path) -> None:
    """Frames that are not learned from, a repeated or a black one in each batch, are predicted as the others."""
    doubting: dict[str, Any] = {"window": 16, "least": 4, "renewed": 1, "memory": 1, "doubt": 1e-3}
    guard = GuardOptions("rollback", "adapted", **doubting, alarm=1e6, most_drift=1e9)  # which never alarms
    images: list[Image.Image | None] = []
    for number in range(8):
        x, y = draw_image(2 * number), draw_image(2 * number + 1)
        images += [x, x, y] if number % 2 else [x, y, None]
    runs: dict[str, dict[str, Any]] = {"guarded": {"guard": guard}, "rem": {"guard": None}, "source": {"guard": None}}
    for name, options in runs.items():
        method = name if name == "source" else "rem"
        go(video(*images), tmp_path / name, method, config=None if name == "source" else REMConfig(lr=0.05), **options)
    rows = {name: rows_of(tmp_path / name) for name in runs}
    by = [row.get("answered_by", "rem") for row in rows["guarded"]]
    assert by[::3] == by[1::3] == by[2::3]
    changes = set(itertools.pairwise(by[::3]))
    assert {("rem", "source"), ("source", "rem")} <= changes
    got = torch.tensor([row["logits"] for row in rows["guarded"]])
    wanted = torch.tensor([rows[name][number]["logits"] for number, name in enumerate(by)])
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


def noisy(grey: int) -> Image.Image:
    noise = np.random.default_rng(grey).integers(0, 4, (36, 40, 3), dtype=np.uint8)
    return Image.fromarray(noise + np.uint8(grey))


@pytest.mark.parametrize(("step", "rate", "told"), [(1, 30, 1), (60, 30, 0), (1, 4, 0)])
def test_a_fast_video_of_near_equal_frames_names_frame_stride_once(
    step: int, rate: int, told: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "remtta")
    frames = (Frame("a.mp4", partial(noisy, 40 + step * (n % 3)), n, n / rate) for n in range(8))
    go(Stream("a.mp4", "video", frames), tmp_path / "run", batch_size=4)
    assert caplog.text.count("the frames of a.mp4 are nearly the same") == told
    assert caplog.text.count("(30 per second); --frame-stride 10 gives") == told
