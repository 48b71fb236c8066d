"""What FFmpeg's libraries make of videos that are interlaced, turned, damaged, joined, or of several tracks."""

import os
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from av.stream import Disposition
from av.video.reformatter import ColorPrimaries, ColorRange, Colorspace, ColorTrc

from remtta.errors import FrameError, UsageError
from remtta.streams.frames import Frame, Gap
from remtta.streams.sources import open_stream
from remtta.streams.video import iter_video
from tests.streams.fakes import numbers

WIDTH, HEIGHT = 128, 96


def scene(time: float) -> np.ndarray:
    """Return a picture (H, W, 3) of smooth shapes that move 4 pixels in a unit of time."""
    y, x = np.mgrid[:HEIGHT, :WIDTH]
    waves = np.sin((x - 4 * time) / 9) + np.cos((y + x / 3) / 11)
    return np.repeat((127.5 + 60 * waves).round().astype(np.uint8)[..., None], 3, axis=2)


def woven(time: float) -> np.ndarray:
    """Return two fields in one picture: the lower one of this time, the upper one half a unit later."""
    picture = scene(time)
    picture[::2] = scene(time + 0.5)[::2]
    return picture


def write(path: Path, pictures: list[np.ndarray], codec: str = "libx264", first: int = 0, **settings: Any) -> Path:
    """Write a video of ten pictures a second; settings are those of its track, or options of its encoder."""
    with av.open(str(path), "w") as container:
        track: Any = container.add_stream(codec, rate=10, options=settings.pop("options", {}))
        track.height, track.width = pictures[0].shape[:2]
        for name, value in settings.items():
            setattr(track, name, value)
        for number, pixels in enumerate(pictures, first):
            frame = av.VideoFrame.from_ndarray(pixels, "rgb24")
            frame.pts, frame.time_base = number, Fraction(1, 10)
            container.mux(track.encode(frame))
        container.mux(track.encode(None))
    return path


def error(frame: Frame, expected: np.ndarray) -> float:
    return error_of(np.asarray(frame.load()), expected)


def error_of(pixels: np.ndarray, expected: np.ndarray) -> float:
    """Return the mean difference in levels of 255."""
    return float(np.abs(pixels.astype(float) - expected).mean())


INTERLACED = {"flags": "+ildct+ilme"}


@pytest.mark.parametrize(
    ("name", "codec", "options"),
    [
        ("a.mp4", "libx264", INTERLACED),
        ("a.ts", "mpeg2video", {**INTERLACED, "b": "4000000"}),
        ("a.avi", "mpeg4", {**INTERLACED, "b": "4000000"}),
    ],
)
def test_interlaced_frames_are_pictures_of_their_first_field(
    name: str, codec: str, options: dict[str, str], tmp_path: Path
) -> None:
    path = write(tmp_path / name, [woven(number) for number in range(12)], codec, options=options)
    with av.open(str(path)) as container:
        assert all(frame.interlaced_frame for frame in container.decode(video=0))
    frames = list(iter_video(str(path)))
    assert numbers(frames) == list(range(12))
    errors = [error(frame, scene(number)) for number, frame in enumerate(frames)]
    weave = [error_of(woven(number), scene(number)) for number in range(12)]
    assert max(errors) < 4 < min(weave)  # levels of 255


def test_interlaced_frames_of_too_few_lines_are_left_as_they_are(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pictures = [woven(number)[:6] for number in range(3)]
    path = write(tmp_path / "a.avi", pictures, "mpeg4", options={**INTERLACED, "b": "4000000"})
    frames = list(iter_video(str(path)))
    assert numbers(frames) == [0, 1, 2]
    assert max(error(frame, picture) for frame, picture in zip(frames, pictures, strict=True)) < 8
    assert [text for text in caplog.messages if "interlaced" in text] == [
        "interlaced frames of 128 x 6 are left as they are (Invalid argument)"
    ]


def test_joined_transport_streams_keep_times_that_go_on_and_every_size(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    large = [np.repeat(np.repeat(scene(number), 2, axis=0), 2, axis=1) for number in range(10)]
    parts = [
        write(tmp_path / "a.ts", [scene(number) for number in range(20)]),
        write(tmp_path / "b.ts", large),
        write(tmp_path / "c.ts", [woven(number) for number in range(10)], options=INTERLACED),
    ]
    joined = tmp_path / "joined.ts"
    joined.write_bytes(b"".join(part.read_bytes() for part in parts))
    frames = list(iter_video(str(joined)))
    assert [frame.load().size for frame in frames] == 20 * [(128, 96)] + 10 * [(256, 192)] + 10 * [(128, 96)]
    assert error(frames[5], scene(5)) < 4 and error(frames[21], large[1]) < 4 and error(frames[31], scene(1)) < 8
    times = [frame.time_s for frame in frames]
    assert times == pytest.approx([number / 10 for number in range(40)], abs=0.05)
    gaps = {number: frame.gap for number, frame in enumerate(frames) if frame.gap}
    assert gaps == dict.fromkeys((20, 30), Gap(0.1, "the times restart", 0))
    assert [text for text in caplog.messages if "restart" in text] == [
        f"{joined}: the times restart at frame 20; they are continued from 2.00 s on"
    ]


def test_a_cover_picture_before_the_film_is_not_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = str(tmp_path / "a.mkv")
    with av.open(path, "w") as container:
        cover, film = container.add_stream("mpeg4", rate=10), container.add_stream("libx264", rate=10)
        cover.width, cover.height, film.width, film.height = 48, 48, WIDTH, HEIGHT
        cover.disposition, film.disposition = Disposition(0), Disposition.default
        container.mux(cover.encode(av.VideoFrame.from_ndarray(np.zeros((48, 48, 3), np.uint8), "rgb24")))
        for number in range(5):
            container.mux(film.encode(av.VideoFrame.from_ndarray(scene(number), "rgb24")))
        container.mux([*cover.encode(None), *film.encode(None)])
    assert [frame.load().size for frame in iter_video(path)] == 5 * [(WIDTH, HEIGHT)]
    tracks = "reading track 1 (h264, 128 x 96), not track 0 (mpeg4, 48 x 48)"
    assert caplog.messages[0] == f"{path} has 2 video tracks: {tracks}"


@pytest.mark.parametrize("angle", [90, 180, -90])
def test_turned_videos_are_upright(angle: int, tmp_path: Path) -> None:
    with av.open(str(tmp_path / "a.mp4"), "w") as container:
        track = container.add_stream("libx264", rate=10)
        track.width, track.height = WIDTH, HEIGHT
        track.set_display_rotation(angle)
        container.mux([*track.encode(av.VideoFrame.from_ndarray(scene(0), "rgb24")), *track.encode(None)])
    [frame] = iter_video(str(tmp_path / "a.mp4"))
    assert error(frame, np.rot90(scene(0), angle // 90)) < 4  # both counterclockwise


COLOURS = np.repeat(np.array([[[200, 40, 40], [40, 200, 40], [40, 40, 200], [255, 255, 255]]], np.uint8), 16, axis=1)
COLOURS = np.repeat(COLOURS, 64, axis=0)


@pytest.mark.parametrize("matrix", [Colorspace.ITU709, Colorspace.SMPTE170M])
@pytest.mark.parametrize("range", [ColorRange.MPEG, ColorRange.JPEG])
def test_colours_follow_the_tags_of_the_stream(matrix: Colorspace, range: ColorRange, tmp_path: Path) -> None:
    tag = {Colorspace.ITU709: 1, Colorspace.SMPTE170M: 6}[matrix]  # AVCOL_SPC
    with av.open(str(tmp_path / "a.mp4"), "w") as container:
        track = container.add_stream("libx264", rate=10, options={"crf": "1"})
        track.width, track.height, track.colorspace, track.color_range = 64, 64, tag, range
        frame = av.VideoFrame.from_ndarray(COLOURS, "rgb24")
        coded = frame.reformat(format="yuv420p", dst_colorspace=matrix, dst_color_range=range)
        container.mux([*track.encode(coded), *track.encode(None)])
    [read] = iter_video(str(tmp_path / "a.mp4"))
    assert error(read, COLOURS) < 4


def test_mjpeg_has_the_full_range(tmp_path: Path) -> None:
    [read] = iter_video(str(write(tmp_path / "a.avi", [COLOURS], "mjpeg", options={"q": "1"}, pix_fmt="yuvj420p")))
    assert error(read, COLOURS) < 6


def hlg(light: np.ndarray) -> np.ndarray:
    light = 0.265 * light  # white is at three quarters of the signal
    return np.where(light <= 1 / 12, np.sqrt(3 * light), 0.1788 * np.log(np.maximum(12 * light - 0.2847, 0.7)) + 0.5599)


def pq(light: np.ndarray) -> np.ndarray:
    power = (203 / 10_000 * light) ** 0.1593  # white is 203 cd/m2
    return ((0.8359 + 18.8516 * power) / (1 + 18.6875 * power)) ** 78.8438


@pytest.mark.parametrize(("transfer", "curve"), [(ColorTrc.ARIB_STD_B67, hlg), (ColorTrc.SMPTE2084, pq)])
def test_hdr_is_tone_mapped(transfer: ColorTrc, curve: Any, tmp_path: Path) -> None:
    grey = np.tile(np.linspace(0, 255, 64).astype(np.uint8)[None, :, None], (64, 1, 3))
    coded = (255 * curve((grey / 255) ** 2.2)).round().astype(np.uint8)
    settings: dict[str, Any] = {
        "pix_fmt": "yuv420p10le",
        "color_trc": transfer,
        "color_primaries": ColorPrimaries.BT2020,
    }
    path = write(tmp_path / "a.mkv", [coded], colorspace=9, options={"crf": "4"}, **settings)
    [frame] = iter_video(str(path))
    assert error(frame, grey) < 6 < 20 < error_of(coded, grey)


def test_damaged_pictures_are_never_those_before_them(tmp_path: Path) -> None:
    path = write(tmp_path / "a.mp4", [scene(5 * number) for number in range(20)], options={"g": "5", "bf": "0"})
    with av.open(str(path)) as container:
        packets = [(packet.pos, packet.size) for packet in container.demux(video=0) if packet.size]
    data = bytearray(path.read_bytes())
    for number in (7, 12):
        position, size = packets[number]
        assert position is not None
        data[position + size // 2 : position + size] = bytes(size - size // 2)
    path.write_bytes(data)
    frames = list(iter_video(str(path)))
    assert numbers(frames) == list(range(20))
    for number in (7, 12):
        with pytest.raises(FrameError, match=r"^cannot be decoded$"):
            frames[number].load()
    whole = [*range(7), 10, 11, *range(15, 20)]  # up to the damage, and from the next key frame on
    assert max(error(frames[number], scene(5 * number)) for number in whole) < 4


@pytest.mark.parametrize("name", ["a.mod", "a.m2t", "a.qt", "a.3gpp", "a.insv", "a.lrv", "a.dat", "a"])
def test_videos_are_known_by_their_content(name: str, tmp_path: Path) -> None:
    formats = {"a.mod": ("mpeg2video", ".mpg"), "a.m2t": ("mpeg2video", ".ts"), "a.dat": ("mpeg2video", ".ts")}
    codec, suffix = formats.get(name, ("libx264", ".mp4"))
    write(tmp_path / f"b{suffix}", [scene(0)] * 3, codec).rename(tmp_path / name)
    stream = open_stream(tmp_path / name)
    assert stream.kind == "video" and len(list(stream.frames)) == 3
    (tmp_path / "list.dat").write_text("a")
    with pytest.raises(UsageError, match="is neither an image nor a video that remtta can read"):
        open_stream(tmp_path / "list.dat")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems refuse such names")
def test_a_name_that_is_not_utf8_is_opened(tmp_path: Path) -> None:
    path = os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.mp4")
    write(tmp_path / "a.mp4", [scene(0)]).rename(path)
    assert len(list(iter_video(path))) == 1
