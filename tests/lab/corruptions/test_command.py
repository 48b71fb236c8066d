import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path, PurePath
from typing import Any, Literal

import numpy as np
import pytest
from PIL import Image

from remtta.errors import RemttaError, UsageError
from remtta.lab.corruptions import corrupt
from remtta.lab.corruptions.image_files import find_images, generator_of, prepare, target_names
from remtta.lab.corruptions.options import CorruptOptions
from remtta.lab.corruptions.tree import TreeSummary, corrupt_tree
from remtta.streams.images import load_image
from remtta.streams.sources import open_stream
from tests.command import Started, in_a_session, refusal_of, remtta_here
from tests.conftest import draw_folder, draw_image, happens, raising
from tests.records import json_of

HAS_PROC = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
CHEAP = ("fog", "brightness", "contrast", "pixelate")
FAST = ("--corruptions", "contrast,impulse_noise", "--jobs", "1")


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Two classes of three small images each, one of them a folder deeper, and one file that is no image."""
    source = tmp_path / "photos"
    for label in ("cat", "dog"):
        (source / label / "more").mkdir(parents=True)
        for number in (2, 10):
            draw_image(number).save(source / label / f"{label}_{number}.png")
        draw_image(30).save(source / label / "more" / "last.jpg")
    (source / "cat" / "notes.txt").write_text("no image")
    return source


def tree_of(folder: Path) -> dict[str, bytes]:
    """Path to content of all files but the record."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != "corrupt.json")
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def record_of(folder: Path) -> dict[str, Any]:
    return json_of(folder / "corrupt.json")


def test_a_labelled_folder_becomes_an_imagenet_c_tree(
    photos: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert remtta_here("corrupt", photos, out, *FAST, "--severity", "1,5") == 0
    stdout, stderr = capfd.readouterr()
    assert stdout == "" and stderr.startswith(
        f"ignored files in {photos}: 1 .txt\n6 images, 24 corrupted images written, "
    )
    names = ["cat_2.png", "cat_10.png", "more/last.png"]
    assert set(tree_of(out)) == {
        f"{name}/{severity}/{label}/{file.replace('cat_', label + '_')}"
        for name in ("contrast", "impulse_noise")
        for severity in (1, 5)
        for label in ("cat", "dog")
        for file in names
    }
    record = record_of(out)
    assert (record["exit_reason"], record["written"], record["skipped"]) == ("done", 24, [])
    assert record["settings"]["seed"] == 0
    assert record["corruptions"]["contrast"]["severities"] == [1, 5]
    assert record["corruptions"]["contrast"]["imagenet"][4] == {"factor": 0.05}


def test_every_file_holds_what_the_library_makes(photos: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    names = "fog", "impulse_noise", "glass_blur"
    assert remtta_here("corrupt", photos, out, "-c", ",".join(names), "-j", "1", "--seed", "7", "--limit", "1") == 0
    source = load_image(photos / "dog" / "dog_2.png")
    for name in names:
        expected = corrupt(source, name, 5, generator_of(7, name, 5, "dog/dog_2.png"))
        assert np.array_equal(np.asarray(load_image(out / name / "5/dog/dog_2.png")), np.asarray(expected)), name


def test_an_unlabelled_folder_and_a_single_image_have_no_class_level(frames: Path, tmp_path: Path) -> None:
    assert remtta_here("corrupt", frames, tmp_path / "out", *FAST, "--limit", "3") == 0
    made = {f"{name}/5/frame_{number}.png" for name in ("contrast", "impulse_noise") for number in range(3)}
    assert set(tree_of(tmp_path / "out")) == made
    assert remtta_here("corrupt", frames / "frame_7.png", tmp_path / "one", "-c", "fog", "-s", "2") == 0
    assert list(tree_of(tmp_path / "one")) == ["fog/2/frame_7.png"]


def test_size_and_format(tmp_path: Path) -> None:
    photos = tmp_path / "photos"
    photos.mkdir()
    draw_image(0, 300, 200).save(photos / "big.png")
    draw_image(1, 50, 40).save(photos / "small.bmp")
    options = ("-c", "brightness", "--jobs", "1")
    assert remtta_here("corrupt", photos, tmp_path / "auto", *options) == 0
    assert set(tree_of(tmp_path / "auto")) == {"brightness/5/big.JPEG", "brightness/5/small.png"}
    with Image.open(tmp_path / "auto/brightness/5/big.JPEG") as big:
        assert (big.format, big.size) == ("JPEG", (300, 200))
    assert remtta_here("corrupt", photos, tmp_path / "cut", *options, "--size", "64", "--format", "png") == 0
    assert load_image(tmp_path / "cut/brightness/5/big.png").size == (64, 64)
    assert remtta_here("corrupt", photos, tmp_path / "set", *options, "--parameters", "imagenet") == 0
    assert (tmp_path / "set/brightness/5/small.JPEG").exists()


def test_prepare_resizes_and_crops_as_imagenet_c_does() -> None:
    image = draw_image(0, 500, 375)
    expected = image.resize((341, 256), Image.Resampling.BILINEAR).crop((58, 16, 282, 240))
    assert prepare(image, 224) == expected
    assert prepare(image, None) is image
    assert prepare(draw_image(0, 3, 1000), 7).size == (7, 7)
    assert prepare(draw_image(0, 32_000, 1), 224).size == (224, 224)


def test_the_tree_does_not_depend_on_the_number_of_processes(photos: Path, tmp_path: Path) -> None:
    options = ("--corruptions", "impulse_noise,fog", "--quiet")
    assert remtta_here("corrupt", photos, tmp_path / "one", *options, "--jobs", "1") == 0
    assert remtta_here("corrupt", photos, tmp_path / "two", *options, "--jobs", "2") == 0
    expected = tree_of(tmp_path / "one")
    assert tree_of(tmp_path / "two") == expected
    assert len(set(expected.values())) == len(expected)


@pytest.mark.parametrize(("form", "kept"), [("png", 0.0), ("jpeg", 0.99)])
def test_files_that_were_cut_off_are_made_again(
    photos: Path, tmp_path: Path, form: Literal["jpeg", "png"], kept: float
) -> None:
    out, options = tmp_path / "out", CorruptOptions(corruptions=("contrast",), format=form, jobs=1)
    corrupt_tree(photos, out, options)
    expected = tree_of(out)
    cut, zeroed, untouched, *_ = sorted(path for path in out.rglob("*") if path.suffix in (".JPEG", ".png"))
    os.utime(untouched, (1, 1))
    for path, rest in ((cut, b""), (zeroed, bytes(300))):
        data = path.read_bytes()
        path.write_bytes(data[: int(kept * len(data))] + rest)
    summary = corrupt_tree(photos, out, options)
    assert (summary.kept, summary.written) == (4, 2)
    assert tree_of(out) == expected and untouched.stat().st_mtime == 1


def test_more_corruptions_and_severities_are_added(photos: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert remtta_here("corrupt", photos, out, "-c", "fog", "-j", "1") == 0
    assert remtta_here("corrupt", photos, out, "-c", "contrast,fog", "-s", "3", "-j", "1") == 0
    assert remtta_here("corrupt", photos, out, "-c", "contrast+fog", "-j", "1") == 0
    contents = {name: entry["severities"] for name, entry in record_of(out)["corruptions"].items()}
    assert contents == {"fog": [3, 5], "contrast": [3], "contrast+fog": [5]}
    assert len(tree_of(out)) == 24


def test_two_runs_at_one_target_make_one_tree(photos: Path, tmp_path: Path) -> None:
    out, begun = tmp_path / "out", list[TreeSummary]()

    def another(summary: TreeSummary) -> None:  # begins and ends while the first is at work
        if not begun:
            begun.append(summary)
            begun.append(corrupt_tree(photos, out, CorruptOptions(corruptions=("contrast", "fog"), jobs=1)))

    first = CorruptOptions(corruptions=("brightness", "fog"), jobs=1)
    assert corrupt_tree(photos, out, first, on_image=another).written < 12 == begun[1].written + 1
    assert set(record_of(out)["corruptions"]) == {"brightness", "contrast", "fog"}
    for names in ("brightness,fog", "contrast"):
        assert remtta_here("corrupt", photos, tmp_path / "apart", "-c", names, "-j", "1") == 0
    assert tree_of(out) == tree_of(tmp_path / "apart")


def test_other_settings_need_overwrite_and_then_nothing_old_stays(
    photos: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert remtta_here("corrupt", photos, out, "-c", "fog,contrast", "-j", "1") == 0
    (out / "contrast" / "mine.txt").write_text("not made by remtta")
    before = tree_of(out)
    for option, value, name in (("--seed", "1", "seed"), ("--size", "32", "size"), ("--format", "jpeg", "format")):
        assert f"was made with {name} " in refusal_of(capfd, "corrupt", photos, out, "-c", "fog", option, value)
    assert tree_of(out) == before
    assert remtta_here("corrupt", photos, out, "-c", "fog", "--seed", "1", "-j", "1", "--overwrite") == 0
    after = tree_of(out)
    assert {path.split("/")[0] for path in after} == {"fog", "contrast"}
    assert [path for path in after if path.startswith("contrast")] == ["contrast/mine.txt"]
    assert not any(after[path] == before[path] for path in after if path.startswith("fog"))
    assert list(record_of(out)["corruptions"]) == ["fog"]


def test_what_cannot_be_read_is_skipped_and_listed(
    photos: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (photos / "cat" / "broken.jpg").write_bytes(b"no image")
    whole = photos / "dog" / "more" / "last.jpg"
    (photos / "dog" / "cut.jpg").write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
    draw_image(0, 32_767, 2).save(photos / "dog" / "long.png")
    out = tmp_path / "out"
    for jobs in ("1", "2"):
        assert remtta_here("corrupt", photos, out, *FAST[:2], "--jobs", jobs) == 0
        err = capfd.readouterr().err
        assert "Warning: skipping cat/broken.jpg: not an image that Pillow can read" in err
        assert "9 images, " in err and ", 3 skipped, " in err
        skipped = {entry["source"]: entry["error"] for entry in record_of(out)["skipped"]}
        assert skipped.keys() == {"cat/broken.jpg", "dog/cut.jpg", "dog/long.png"}
        assert skipped["dog/long.png"] == "32767x2: sides may have up to 32766 pixels"
    assert len(tree_of(out)) == 12


def test_files_that_are_not_read_are_counted(photos: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "remtta")
    (tmp_path / "none").mkdir()
    for path in (photos / "a.heic", photos / "b.HEIC", tmp_path / "none" / "c.heic"):
        path.touch()
    find_images(photos, tmp_path / "out")
    assert caplog.messages == [f"ignored files in {photos}: 2 .heic, 1 .txt"]
    with pytest.raises(UsageError, match=r"none: 1 \.heic, and no images in this folder or below it$"):
        find_images(tmp_path / "none", tmp_path / "out")


def test_the_record_of_a_tree_is_not_counted_as_an_ignored_file(photos: Path, tmp_path: Path) -> None:
    assert remtta_here("corrupt", photos, tmp_path / "out", *FAST) == 0
    (tmp_path / "out" / "other.json").touch()
    stream = open_stream(str(tmp_path))
    assert stream.left_out == {".json": 1, ".txt": 1} and stream.num_frames == 6 + 12


def test_a_tree_made_before_is_no_source(photos: Path, tmp_path: Path) -> None:
    assert remtta_here("corrupt", photos, tmp_path / "out", *FAST) == 0
    (tmp_path / "out").rename(photos / "out")
    (photos / "link").symlink_to(photos / "out")
    assert len(list((photos / "out").rglob("*.*"))) > 1
    assert not [image for image in find_images(photos, tmp_path / "other") if image.name.startswith(("out/", "link/"))]


def test_a_destination_in_the_source_is_refused(photos: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = sorted(photos.rglob("*"))
    (photos / "cat" / "link").symlink_to(photos, target_is_directory=True)
    for target in (photos, photos / "out", photos / "cat" / "link" / "out"):
        line = refusal_of(capfd, "corrupt", photos, target, *FAST)
        assert f"{target} is the source itself or lies in it; choose another DST" in line
    (photos / "cat" / "link").unlink()
    assert sorted(photos.rglob("*")) == before


def test_names_that_would_fall_together_stay_apart(tmp_path: Path) -> None:
    names = [PurePath(name) for name in ("x/a.bmp", "x/a.TIF", "x/a.jpg", "y/a.bmp", "x/b.bmp", "x/B.tif", "x/c.JPG")]
    targets = {path.as_posix(): target for path, target in target_names(names, "jpeg").items()}
    renamed = {"x/a.bmp": "x/a.bmp.JPEG", "x/a.TIF": "x/a.TIF.JPEG", "y/a.bmp": "y/a.JPEG", "x/b.bmp": "x/b.bmp.JPEG"}
    assert ({"x/a.jpg": "x/a.jpg", "x/c.JPG": "x/c.JPG"} | renamed).items() <= targets.items()
    hard = [PurePath(name) for name in ("a.bmp", "a.tif", "a.bmp.tif", "a.bmp.jpeg", "a.bmp.JPEG_", "a.bmp_.bmp")]
    for kind in ("jpeg", "png"):
        assert len({target.casefold() for target in target_names(hard, kind).values()}) == len(hard)

    source = tmp_path / "in"
    source.mkdir()
    for number, name in enumerate(("a.bmp", "a.png", "a.jpg")):
        draw_image(number).save(source / name)
    assert remtta_here("corrupt", source, tmp_path / "out", "-c", "contrast", "-j", "1") == 0
    assert set(tree_of(tmp_path / "out")) == {f"contrast/5/{name}" for name in ("a.bmp.png", "a.png", "a.jpg.png")}


def test_a_record_cannot_have_other_folders_removed(frames: Path, tmp_path: Path) -> None:
    out, mine = tmp_path / "out", tmp_path / "mine"
    (mine / "5").mkdir(parents=True)
    options = ("-c", "contrast", "-j", "1")
    assert remtta_here("corrupt", frames, out, *options) == 0
    record = record_of(out)
    record["corruptions"]["../mine"] = {"severities": [5]}
    record["corruptions"]["contrast"]["severities"] = [5, "../../mine"]
    (out / "corrupt.json").write_text(json.dumps(record))
    assert remtta_here("corrupt", frames, out, *options, "--overwrite") == 0
    assert (mine / "5").is_dir()


def test_what_the_disk_refuses_is_one_line(frames: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert remtta_here("corrupt", frames, out, "-c", "fog", "-j", "1", "-q") == 0
    (out / "contrast").mkdir()
    (out / "contrast" / "5").write_text("a file where a folder is needed")
    assert remtta_here("corrupt", frames, out, "-c", "contrast", "-j", "2") == 1
    assert re.fullmatch(r"Error: .* cannot be written.*\n", capfd.readouterr().err)
    assert record_of(out)["exit_reason"] == "unfinished"


def test_an_image_that_is_not_corrupted_is_named(frames: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("remtta.lab.corruptions.image_files.corrupt", raising(MemoryError()))
    with pytest.raises(RemttaError, match=r"frame_0.png: fog at severity 5 failed: MemoryError$"):
        corrupt_tree(frames, tmp_path / "out", CorruptOptions(corruptions=("fog",), jobs=1))


def in_group(group: int) -> list[int]:
    """The processes of a session, other than zombies."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == group and fields[0] != "Z":
            found.append(int(entry.parent.name))
    return found


def start(source: Path, out: Path, before: Callable[[], object] = in_a_session) -> Started:
    """Begin a long run in two processes, by itself in a session of its own; back once the first files are there."""
    options = "--jobs", "2", "--severity", "1,2,3,4,5", "--corruptions", ",".join(CHEAP)
    process = Started("corrupt", source, out, *options, before=before)
    assert happens(lambda: sum(1 for _ in out.glob("*/*/*.JPEG")) >= 20, within_s=60)
    assert process.returncode is None
    return process


def test_a_signal_to_all_leaves_whole_files_and_no_process(tmp_path: Path) -> None:
    source, out = draw_folder(tmp_path / "photos", range(60), "{}.png", 120, 100), tmp_path / "out"
    with start(source, out) as process:
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        _, stderr = process.communicate(timeout=30)
        assert process.returncode == 130, stderr
    assert b"Traceback" not in stderr
    assert b"written" in stderr and stderr.endswith(b"stopped by SIGINT; run it again to continue\n")
    wait_for_none_in(process.pid)
    made = tree_of(out)
    assert 20 <= len(made) < 60 * 20
    for path in made:
        assert path.endswith(".JPEG")
        load_image(out / path)  # whole, or it would raise
    assert (record_of(out)["written"], record_of(out)["exit_reason"]) == (len(made), "SIGINT")


@HAS_PROC
def test_workers_end_with_a_killed_parent_and_the_rest_is_made_later(tmp_path: Path) -> None:
    source, out = draw_folder(tmp_path / "photos", range(10), "{}.png", 120, 100), tmp_path / "out"
    with start(source, out) as process:
        process.kill()
    wait_for_none_in(process.pid)
    owners = [Path("/proc", path.name.split(".")[-2]) for path in out.rglob(".*.tmp")]
    assert happens(lambda: not any(owner.exists() for owner in owners), within_s=15)  # nor any that waits to be reaped
    before = len([path for path in tree_of(out) if path.endswith(".JPEG")])
    options = CorruptOptions(corruptions=CHEAP, severities=(1, 2, 3, 4, 5), jobs=1)
    summary: TreeSummary = corrupt_tree(source, out, options)
    assert (summary.kept, summary.written) == (before, 10 * 20 - before)
    corrupt_tree(source, tmp_path / "whole", options)
    for path in out.rglob(".*.tmp"):
        os.utime(path, (0, 0))  # as long after the kill
    corrupt_tree(source, out, options)
    assert tree_of(out) == tree_of(tmp_path / "whole")


def wait_for_none_in(group: int) -> None:
    assert happens(lambda: not in_group(group), within_s=15), in_group(group)
