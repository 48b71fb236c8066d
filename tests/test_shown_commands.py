"""The command lines that the documents show are run, on tiny data, unless there is a reason not to."""

import re
import shutil
from pathlib import Path

import pytest

from tests.command import remtta_here
from tests.conftest import TINY_OPTIONS, draw_folder, draw_video
from tests.runs.tiny import adapt_tiny
from tests.test_documents import PAGES, commands

NOT_RUN = {
    r"demo|bench|models": "takes minutes; has tests of its own, and .ci/run runs the demo",
    r"eval|corrupt|doctor": "takes a data set; has tests of its own",
    r"export|adapt cams.txt|apply run1 --output adapted.onnx": "has tests of its own, which take seconds",
    r".*rtsp://|adapt http": "takes a camera",
    r"adapt -": "goes with another command or a file; has tests of its own",
    r".*(clip:|local-dir:)|adapt \./frames|adapt (drive.mp4|walk.avi)": "downloads or takes weights",
    r"report run1 run2 table1": "takes an evaluation; has tests of its own",
    r"score run1 run1/saved_frames/labels.tsv": "takes classes written by hand; has tests of its own",
}


def reason(words: list[str]) -> str | None:
    """Why a command is not run, if it is not."""
    return next((why for pattern, why in NOT_RUN.items() if re.match(pattern, " ".join(words))), None)


SHOWN = {page: [words for words in commands(page.read_text()) if not reason(words)] for page in PAGES}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of what the examples take: frames, videos, and runs."""
    folder = tmp_path_factory.mktemp("shown")
    frames = draw_folder(folder / "frames", range(6))
    for name in ("frames/3_fog", "labelled/clear"):
        draw_folder(folder / "demo" / name, range(6))
    draw_video(folder / "clip.mp4", range(4))
    draw_video(folder / "later.mp4", range(4, 8))
    adapt_tiny(frames, folder / "run1")
    (folder / "labels.tsv").write_text("0\t1\n")
    for name in ("cam1", "cam2", "cam3", "try"):
        shutil.copytree(folder / "run1", folder / name)
    return folder


@pytest.mark.parametrize("page", [page for page, shown in SHOWN.items() if shown], ids=lambda page: page.name)
def test_the_commands_of_a_page_run_one_after_the_other(
    page: Path, made: Path, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    shutil.copytree(made, here)
    shutil.copy(checkpoint, here / "vit.safetensors")
    monkeypatch.chdir(here)
    for words in SHOWN[page]:
        assert remtta_here(*on_tiny_data(words)) == 0, words


def on_tiny_data(words: list[str]) -> list[str]:
    """The same with the tiny model, its checkpoint and a new folder; the demo's model stays."""
    if "remtta-demo" in words:
        return [*words, "--overwrite"]
    if words[0] == "adapt":
        at = words.index("--model") if "--model" in words else len(words)
        model = [] if "--delta" in words else TINY_OPTIONS
        words = [*words[:at], *model, *words[at + 2 :], "--overwrite"]
    return words


def test_most_commands_without_a_reason_are_there() -> None:
    names = {words[0] for shown in SHOWN.values() for words in shown}
    assert {"adapt", "apply", "inspect", "report", "methods"} <= names
