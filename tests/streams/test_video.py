import os
import re
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import cv2
import numpy as np
import pytest
from PIL import Image

from remtta.errors import FrameError, StreamError
from remtta.streams.frames import Frame
from remtta.streams.sources import open_stream
from remtta.streams.video import iter_video
from tests.streams.fakes import numbers

FPS = 10


def write_video(path: Path, fourcc: str, images: list[np.ndarray]) -> Path:
    height, width, _ = images[0].shape
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*fourcc), FPS, (width, height))
    assert writer.isOpened()
    for image in images:
        writer.write(image)
    writer.release()
    return path


def ramp(path: Path, fourcc: str, count: int) -> Path:
    """Write plain grey frames, each 20 levels lighter than the one before."""
    return write_video(path, fourcc, [np.full((48, 64, 3), 20 * number, np.uint8) for number in range(count)])


def noise(path: Path, count: int) -> Path:
    """Write frames so large that a cut falls between the first and the last of them."""
    rng = np.random.default_rng(0)
    return write_video(path, "MJPG", [rng.integers(0, 256, (96, 128, 3), dtype=np.uint8) for _ in range(count)])


def cut(path: Path, kept: float) -> None:
    whole = path.read_bytes()
    path.write_bytes(whole[: int(kept * len(whole))])


def steps(frames: list[Frame]) -> list[int]:
    """Return the frame of `ramp` that each image shows, by its brightness."""
    return [round(float(np.asarray(frame.load()).mean()) / 20) for frame in frames]


@pytest.mark.parametrize(
    ("name", "fourcc", "stride"),
    [("10:30.mp4", "mp4v", 1), ("clip.avi", "MJPG", 3), ("b_frames.avi", "mpg2", 1), ("b_frames.avi", "mpg2", 3)],
)
def test_frames_arrive_in_order_with_number_and_time(
    tmp_path: Path, monkeypatch: Any, name: str, fourcc: str, stride: int, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(ramp(tmp_path / name, fourcc, 10).parent)
    path, late = name, fourcc == "mpg2"  # in an AVI, B-frames delay all by one
    frames = list(iter_video(path, stride=stride))
    assert numbers(frames) == list(range(10))[::stride]
    assert steps(frames[::-1]) == numbers(frames)[::-1]  # loaded late, and in any order
    assert [frame.time_s for frame in frames] == pytest.approx(
        [(number + late) / FPS for number in range(10)[::stride]]
    )
    assert {frame.source for frame in frames} == {path} and not caplog.messages


@pytest.mark.parametrize(("suffix", "format"), [(".mp4", None), (".ts", "mpegts")])
def test_pictures_far_apart_beside_sound_are_all_read(
    suffix: str, format: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, seconds = tmp_path / f"slides{suffix}", 110  # more packets of sound between two than OpenCV skips by default
    with av.open(str(path), "w", format=format) as container:
        video, audio = container.add_stream("libx264", rate=1), container.add_stream("aac", rate=44_100)
        video.width, video.height, video.options = 64, 48, {"tune": "zerolatency"}
        sound = av.AudioFrame.from_ndarray(np.zeros((1, 44_100), np.float32), "fltp", "mono")
        audio.layout, sound.rate = "mono", 44_100
        for second in range(3 * seconds):
            if second % seconds == 0:
                pixels = np.full((48, 64, 3), 40 * second // seconds, np.uint8)
                frame = av.VideoFrame.from_ndarray(pixels, "rgb24")
                frame.pts, frame.time_base = second, Fraction(1)
                container.mux(video.encode(frame))
            sound.pts, sound.time_base = 44_100 * second, Fraction(1, 44_100)
            container.mux(audio.encode(sound))
        container.mux([*video.encode(None), *audio.encode(None)])
    frames = list(iter_video(str(path)))
    assert steps(frames) == [0, 2, 4]
    assert [frame.time_s for frame in frames] == pytest.approx([0, seconds, 2 * seconds], abs=0.1)


@pytest.mark.parametrize(("missing", "warns"), [(range(10, 20), True), ((), False)])
def test_a_hole_in_the_times_of_a_video_without_duration_is_reported(
    missing: Any, warns: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = str(tmp_path / "live.webm")
    with av.open(path, "w", options={"live": "1"}) as container:
        video = container.add_stream("libvpx", rate=25)
        video.width, video.height = 64, 48
        for number in range(30):
            frame = av.VideoFrame.from_ndarray(np.zeros((48, 64, 3), np.uint8), "rgb24")
            frame.pts = number
            container.mux([packet for packet in video.encode(frame) if packet.pts not in missing])
        container.mux(video.encode(None))
    assert len(list(iter_video(path))) == 30 - len(missing)
    expected = [f"{path} has no frame between 0.36 s and 0.80 s; some may be missing"] if warns else []
    assert caplog.messages == expected


def test_frames_are_upright_rgb(tmp_path: Path) -> None:
    blue_above_red = np.zeros((48, 64, 3), np.uint8)
    blue_above_red[:24, :, 0] = blue_above_red[24:, :, 2] = 255  # OpenCV writes BGR
    [frame] = iter_video(str(write_video(tmp_path / "clip.avi", "MJPG", [blue_above_red])))
    image = frame.load()
    assert (image.mode, image.size) == ("RGB", (64, 48))
    assert np.abs(np.asarray(image)[4, 4].astype(int) - (0, 0, 255)).max() <= 8
    assert np.abs(np.asarray(image)[-4, 4].astype(int) - (255, 0, 0)).max() <= 8


def test_a_truncated_avi_gives_what_it_has_and_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = noise(tmp_path / "clip.avi", 20)
    cut(path, 0.6)
    frames = list(iter_video(str(path)))
    assert numbers(frames) == list(range(len(frames)))
    assert 8 <= len(frames) <= 13
    assert {frame.load().size for frame in frames} == {(128, 96)}
    assert caplog.messages[0].startswith(f"{path} ended after {len(frames)} of about 20 frames; it may be truncated")


@pytest.mark.parametrize("content", ["", "not a video\n" * 100, None])
def test_a_text_or_a_cut_file_named_mp4_is_a_stream_error(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "clip1.mp4"
    if content is None:
        cut(ramp(path, "mp4v", 10), 0.5)
    else:
        path.write_text(content)
    with pytest.raises(StreamError, match=r"clip1\.mp4 cannot be opened as a video \(.*\); it may be truncated"):
        list(open_stream(path).frames)


def test_a_frame_of_over_256_mib_is_not_decoded(tmp_path: Path) -> None:
    Image.new("1", (9600, 9600)).save(tmp_path / "a.mp4", "PNG")
    [frame] = open_stream(tmp_path / "a.mp4").frames
    with pytest.raises(FrameError, match="Cannot allocate memory"):
        frame.load()


def test_a_broken_video_among_paths_is_one_unreadable_frame(tmp_path: Path) -> None:
    broken = tmp_path / "b.mp4"
    broken.write_text("not a video\n")
    paths = [ramp(tmp_path / "a.avi", "MJPG", 2), broken, ramp(tmp_path / "c.avi", "MJPG", 3)]
    frames = list(open_stream(paths).frames)
    assert [Path(frame.source).name for frame in frames] == ["a.avi"] * 2 + ["b.mp4"] + ["c.avi"] * 3
    assert steps(frames[:2] + frames[3:]) == [0, 1, 0, 1, 2]
    with pytest.raises(FrameError, match=r"^cannot be opened as a video"):
        frames[2].load()


def test_a_folder_of_videos_is_read_one_after_the_other(tmp_path: Path) -> None:
    for name, count in (("clip_10.avi", 2), ("clip_2.mp4", 3)):
        ramp(tmp_path / name, "MJPG" if name.endswith("avi") else "mp4v", count)
    stream = open_stream(tmp_path)
    assert (stream.kind, stream.num_frames) == ("folder", None)
    assert [(Path(frame.source).name, frame.number) for frame in stream.frames] == [
        *(("clip_2.mp4", number) for number in range(3)),
        *(("clip_10.avi", number) for number in range(2)),
    ]


def test_stride_and_limit_run_on_across_videos(tmp_path: Path) -> None:
    paths = [ramp(tmp_path / name, "MJPG", 3) for name in ("a.avi", "b.avi", "c.avi")]
    frames = list(open_stream(paths, frame_stride=2, limit=3).frames)
    assert [(Path(frame.source).name, frame.number) for frame in frames] == [("a.avi", 0), ("a.avi", 2), ("b.avi", 1)]


def test_without_opencv_a_camera_is_a_stream_error_that_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cv2", None)
    with pytest.raises(StreamError, match=r"pip install opencv-python-headless$"):
        next(open_stream("0").frames)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")
def test_an_unfinished_read_closes_the_video(tmp_path: Path) -> None:
    path = str(ramp(tmp_path / "clip.avi", "MJPG", 5))
    frames = iter_video(path)
    next(frames)

    def open_files() -> list[str]:
        return [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.exists()]

    assert path in open_files()
    del frames
    assert path not in open_files()


def test_av1_is_decoded(tmp_path: Path) -> None:
    path = tmp_path / "clip.mp4"
    noise = [Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)) for _ in range(3)]
    noise[0].save(path, "AVIF", save_all=True, append_images=noise[1:])  # AV1 in an MP4's container
    assert [frame.load().size for frame in iter_video(str(path))] == 3 * [(64, 64)]


def test_a_frame_that_cannot_be_decoded_is_one_unreadable_frame_among_the_others(tmp_path: Path) -> None:
    video = ramp(tmp_path / "a.avi", "MJPG", 12)
    data = bytearray(video.read_bytes())
    starts = [found.start() for found in re.finditer(b"00dc", bytes(data))]
    data[starts[4] + 8 : starts[5]] = bytes(starts[5] - starts[4] - 8)  # the first name is in the header
    video.write_bytes(data)
    frames = list(iter_video(str(video)))
    assert [frame.number for frame in frames] == list(range(12))
    times = [frame.time_s for frame in frames]
    with pytest.raises(FrameError, match="cannot be decoded"):
        frames.pop(3).load()
    assert steps(frames) == [0, 1, 2, *range(4, 12)]
    assert times == pytest.approx([number / 10 for number in range(12)])
