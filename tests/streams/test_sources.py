import itertools
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from remtta.errors import FrameError, UsageError
from remtta.streams.paths import read_paths
from remtta.streams.sources import Stream, open_stream
from tests.conftest import draw_image
from tests.streams.pipes import in_time, paths_in


def draw(folder: Path, *names: str) -> None:
    for number, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        draw_image(number, 4, 3).save(folder / name)


def names(stream: Stream) -> list[str]:
    return [Path(frame.source).name for frame in stream.frames]


def test_videos_in_a_folder_of_images_are_left_out_and_counted(frames: Path, caplog: pytest.LogCaptureFixture) -> None:
    (frames / "clip.mp4").touch()
    assert len(names(open_stream(frames))) == 12
    assert caplog.messages == [f"{frames} is read as a folder of images; ignoring 1 video in it"]


def test_a_folder_may_be_named_like_a_video_a_glob_or_a_camera(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("clips.mp4", "set[1]", "0"):
        draw(tmp_path, f"{folder}/a.png", f"{folder}/a[1].png")
        assert open_stream(folder).kind == "folder"
        assert names(open_stream(f"{folder}/a[1].png")) == ["a[1].png"]
    assert open_stream(0).kind == "camera"


def test_only_files_in_a_folder_count_and_loops_are_walked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw(tmp_path, "a.png", "below/b.png")
    links = {
        "loop": ".",
        "below/up": "..",
        "below/c.png": "../a.png",
        "below/d.png": "missing.png",
        "below/e.png": "e.png",
    }
    for link, target in links.items():
        (tmp_path / link).symlink_to(target)
    for pipe in ("pipe.png", "pipe.mp4"):
        os.mkfifo(tmp_path / pipe)
    monkeypatch.chdir(tmp_path)  # the path of a socket has to be short
    with socket.socket(socket.AF_UNIX) as unix:
        unix.bind("socket.png")
        assert in_time(lambda: names(open_stream(tmp_path))) == ["a.png", "b.png", "c.png"]
        assert in_time(lambda: names(open_stream("*.*"))) == ["a.png"]


@pytest.mark.parametrize("name", ["pipe.png", "pipe.mp4", "folder.mp4", "missing.mp4"])
def test_a_path_without_a_file_is_an_unreadable_frame(tmp_path: Path, name: str) -> None:
    if name.startswith("pipe"):
        os.mkfifo(tmp_path / name)
    (tmp_path / "folder.mp4").mkdir()
    [frame] = in_time(lambda: list(open_stream([tmp_path / name]).frames))
    told = {"missing.mp4": "no such file", "folder.mp4": "a folder; name the images in it"}.get(
        name, "not a regular file"
    )
    with pytest.raises(FrameError, match=f"^{told}$"):
        in_time(frame.load)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        *((name, ": no such file or folder$") for name in ("missing.png", "missing/", "missing.mp4", "", "a\0b", "-1")),
        ("x" * 5000, ": no such file or folder$"),
        ("*.jpg", r"\*\.jpg: no file matches; quote the pattern and check it$"),
        ("empty", "no images or videos in this folder or below it$"),
        ("cams.txt", r"cams\.txt is a text file; add --streams if it lists streams"),
        ("a.ONNX", r"a\.ONNX is a file of a model, not of frames; name it with --model, and frames as the source$"),
        ("run/delta.safetensors", "is a file of a model, not of frames; name it with --checkpoint, and frames as"),
        *((name, f"{name} is neither an image nor a video that remtta can read") for name in ("model.ort", "model")),
        ("list", "list is a pipe; give paths on standard input, with - as the source"),
    ],
)
def test_a_name_without_a_source_is_a_usage_error(
    source: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw(tmp_path, "a.png")
    (tmp_path / "empty").mkdir()
    (tmp_path / "cams.txt").write_text("a=0\n")
    (tmp_path / "run").mkdir()
    for name in ("a.ONNX", "run/delta.safetensors"):
        (tmp_path / name).touch()
    for name in ("model.ort", "model"):
        (tmp_path / name).write_bytes(b"\x08\x07\x12\x07pytorch")  # how an ONNX file begins
    os.mkfifo(tmp_path / "list")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=message):
        open_stream(source)
    with pytest.raises(UsageError, match="-0 is for paths on standard input"):
        open_stream(tmp_path, null_separated=True)


def test_a_glob_goes_below_with_two_stars(tmp_path: Path) -> None:
    draw(tmp_path, "a.png", "b/c.png", "b/d/e.png", "b/f.jpg")
    (tmp_path / "b" / "loop").symlink_to(tmp_path)
    assert names(open_stream(f"{tmp_path}/**/*.png")) == ["a.png", "c.png", "e.png"]


@pytest.mark.parametrize("source", ["", "/**/*.png", "/*/*.png"])
def test_thumbnails_and_hidden_files_are_no_frames(source: str, tmp_path: Path) -> None:
    draw(tmp_path, "day/a.png", *(f"day/{name}/a.png" for name in ("@eaDir", "__MACOSX", ".cache")), "day/._a.png")
    (tmp_path / "day" / "Thumbs.db").touch()
    assert names(open_stream(f"{tmp_path}{source}")) == ["a.png"]
    assert names(open_stream(f"{tmp_path}/day/@eaDir/*.png")) == ["a.png"]  # as named


@pytest.mark.parametrize("source", [-1, 2**31, "99999999999"])
def test_a_number_that_is_no_camera_is_refused(source: int | str) -> None:
    with pytest.raises(UsageError, match=f"^there is no camera {source}; cameras are numbered from 0$"):
        open_stream(source)


def test_a_standard_input_that_cannot_be_read_is_a_usage_error() -> None:
    with open(os.devnull, "wb") as unreadable, pytest.raises(UsageError, match=r"^standard input cannot be read \(Bad"):
        list(read_paths(unreadable.fileno()))


@pytest.mark.parametrize(
    ("stride", "limit", "expected"), [(1, 5, [0, 1, 2, 3, 4]), (5, None, [0, 5, 10]), (5, 2, [0, 5]), (100, 100, [0])]
)
def test_stride_and_limit_pick_frames_and_count_them(
    frames: Path, stride: int, limit: int | None, expected: list[int]
) -> None:
    stream = open_stream(frames, frame_stride=stride, limit=limit)
    assert stream.num_frames == len(expected)
    assert names(stream) == [f"frame_{number}.png" for number in expected]


def test_paths_are_taken_as_they_come(tmp_path: Path) -> None:
    draw(tmp_path, "b.png", "a.png")
    paths = [tmp_path / name for name in ("b.png", "missing.png", "a.png", "b.png")]
    stream = open_stream(paths)
    assert (stream.name, stream.kind, stream.num_frames) == ("paths", "paths", 4)
    assert names(stream) == ["b.png", "missing.png", "a.png", "b.png"]
    endless = open_stream(itertools.cycle(paths))
    assert endless.num_frames is None and Path(next(endless.frames).source).name == "b.png"


@pytest.mark.parametrize(
    ("source", "kind", "expected"),
    [
        ("frame_3.png", "image", ["frame_3.png"]),
        ("frame_1*.png", "glob", ["frame_1.png", "frame_10.png", "frame_11.png"]),
        ("0", "camera", None),
        (0, "camera", None),
        ("rtsp://camera.invalid/live", "url", None),
        ("http://camera.invalid/*.mjpg", "url", None),
    ],
)
def test_a_source_has_a_name_a_kind_and_perhaps_a_length(
    frames: Path, monkeypatch: pytest.MonkeyPatch, source: str | int, kind: str, expected: list[str] | None
) -> None:
    monkeypatch.chdir(frames)
    stream = open_stream(source)
    assert (stream.name, stream.kind, stream.num_frames) == (str(source), kind, expected and len(expected))
    assert expected is None or names(stream) == expected


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """Both ends of a pipe that stays open."""
    read_end, write_end = os.pipe()
    yield read_end, write_end
    os.close(read_end)
    os.close(write_end)


@pytest.fixture
def standard_input(pipe: tuple[int, int]) -> Iterator[int]:
    """Where to write what standard input is to hold."""
    kept = os.dup(0)
    os.dup2(pipe[0], 0)
    yield pipe[1]
    os.dup2(kept, 0)
    os.close(kept)


def test_a_file_whose_name_is_not_utf8_is_loaded(tmp_path: Path) -> None:
    path = os.fsencode(tmp_path) + b"/caf\xe9.png"
    try:
        draw_image(0, 4, 3).save(os.fsdecode(path))
    except OSError:
        pytest.skip("this file system has only UTF-8 names")
    [frame] = open_stream(paths_in(path + b"\n")).frames
    assert frame.load().size == (4, 3)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_a_byte_order_mark_is_not_part_of_a_path(encoding: str) -> None:
    assert paths_in("ä.png\r\nb.png\r\n".encode(encoding)) == ["ä.png", "b.png"]
    assert paths_in("ä.png\0b.png\0".encode(encoding), null_separated=True) == ["ä.png", "b.png"]


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ((b"a.png\nb.p", b"ng\n"), ["a.png", "b.png"]),
        ((b"first\nb\xc3", b"\xa4r.png\n"), ["first", "bär.png"]),  # split inside a letter
    ],
)
def test_a_path_arrives_as_soon_as_it_is_complete(
    parts: tuple[bytes, bytes], expected: list[str], pipe: tuple[int, int]
) -> None:
    read_end, write_end = pipe
    paths = read_paths(read_end)
    for part, path in zip(parts, expected, strict=True):
        os.write(write_end, part)
        assert in_time(lambda: next(paths)) == path


@pytest.mark.parametrize(
    ("stride", "limit", "written", "expected"), [(1, 1, b"a\n", ["a"]), (3, 2, b"a\nb\nc\nd\n", ["a", "d"])]
)
def test_a_limit_ends_the_stream_while_the_pipe_stays_open(
    standard_input: int, stride: int, limit: int, written: bytes, expected: list[str]
) -> None:
    os.write(standard_input, written)
    stream = open_stream("-", frame_stride=stride, limit=limit)
    assert (stream.name, stream.kind, stream.num_frames) == ("-", "paths", None)
    assert in_time(lambda: names(stream)) == expected


def test_the_wrong_separator_is_reported_at_once() -> None:
    none = "standard input holds no paths; give an image or a video by its name"
    png, tar = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\0\x20\x08\x02", b"a.png".ljust(257, b"\0") + b"ustar\x0000"
    for written, null_separated, message in (
        (b"a.png\0b.png\0", False, "end in NUL, not in newline; add -0"),
        (b"GIF89a\x20\0\x20\0\xf7\x01\0", False, none),
        *((content, separated, none) for content in (png, tar) for separated in (False, True)),
        (b"a.png\n" * 6_000, True, "longer than 32768 bytes; do they end in newline"),
        (b"a.png\nb.png\n", True, "end in newline, not in NUL; leave -0 out"),
        (b"a" * 40_000, False, "write one per line"),
    ):
        with pytest.raises(UsageError, match=message):
            paths_in(written, null_separated=null_separated)
