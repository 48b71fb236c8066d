"""The page of examples/device in a browser, with the model and the drive of the demo."""

import os
import runpy
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from PIL import Image

from remtta.lab.demo.drive import draw_drive
from tests.command import remtta_here

DEVICE = Path(__file__).parents[1] / "examples" / "device"
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
DRAWN = """
window.drawn = [];
const fill = CanvasRenderingContext2D.prototype.fillText;
CanvasRenderingContext2D.prototype.fillText = function (...args) { drawn.push(args[0]); fill.apply(this, args); };
"""
PAGE = "http://localhost/index.html"


@pytest.fixture(scope="module")
def runtime() -> Path:
    """The folder of onnxruntime-web."""
    if CHROMIUM is None:
        pytest.skip("needs Chromium")
    folders = [Path(each) for each in os.environ.get("NODE_PATH", "").split(os.pathsep) if each]
    folders += [parent / "node_modules" for parent in DEVICE.parents] + [DEVICE / "node_modules"]
    found = [folder / "onnxruntime-web" for folder in folders if (folder / "onnxruntime-web").is_dir()]
    if not found:
        pytest.skip("no onnxruntime-web, neither in NODE_PATH nor in node_modules: npm install it")
    return found[0]


@pytest.fixture(scope="module")
def drive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the demo's classifier as a file that adapts itself, and 24 frames of the drive in order."""
    folder = tmp_path_factory.mktemp("drive")
    assert remtta_here("export", "--model", "remtta-demo", "--adaptive", "-o", folder / "adaptive.onnx") == 0
    for number, frame in enumerate(draw_drive(folder, 4, 0)):
        frame.path.rename(folder / f"{number:02}.png")
    return folder


@pytest.fixture
def tab(runtime: Path, drive: Path) -> Iterator[Any]:
    """A tab of a browser that gets the page's files, and nothing else."""
    from playwright.sync_api import sync_playwright

    files = {"index.html": DEVICE / "index.html", "classifier.mjs": DEVICE / "classifier.mjs"}
    problems: list[str] = []

    def serve(route: Any) -> None:
        name = urlsplit(route.request.url).path.removeprefix("/")
        path = files.get(name) or (drive / name if name.endswith(".onnx") else runtime.parent / name[13:])
        if path.is_file():
            kind = {".mjs": "text/javascript", ".wasm": "application/wasm", ".html": "text/html"}
            route.fulfill(path=path, content_type=kind.get(path.suffix, "application/octet-stream"))
        else:
            problems.append(route.request.url)
            route.abort()

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": 480, "height": 720})
        tab.set_default_timeout(120_000)  # of a loaded machine
        tab.on("pageerror", lambda error: problems.append(str(error)))
        tab.route("**/*", serve)
        tab.add_init_script(DRAWN)
        tab.goto(PAGE)
        yield tab
        browser.close()
    assert [each for each in problems if not each.endswith("favicon.ico")] == []


def check(tab: Any, name: str, frames: list[Path], rows: list[dict[str, Any]]) -> None:
    """Choose images; compare what the page writes on each with predictions of the loop in Python."""
    before = tab.evaluate("drawn.length")
    tab.locator("#files").set_input_files(frames)
    tab.wait_for_function(f"drawn.length === {before + len(frames)}")
    for text, row in zip(tab.evaluate(f"drawn.slice({before})"), rows, strict=True):
        label, _, percent = text.removesuffix(" %").rpartition(", ")
        assert label == f"{name}: {row['label']}"
        assert float(percent) == pytest.approx(100 * row["prob"], abs=0.06)


def test_a_browser_shows_what_the_loop_in_python_predicts(tab: Any, drive: Path) -> None:
    frames = sorted(drive.glob("*.png"))
    images = [Image.open(frame).convert("RGB") for frame in frames]
    load = partial(runpy.run_path(str(DEVICE / "classify.py"))["Classifier"], drive / "adaptive.onnx", None)
    adapted, source = list(map(load(), images)), [load()(image) for image in images]
    assert [row["class"] for row in adapted] != [row["class"] for row in source]

    tab.wait_for_selector("#files:enabled")
    check(tab, "adapted", frames[:12], adapted[:12])
    tab.reload()
    tab.wait_for_selector("#files:enabled")
    check(tab, "adapted", frames[12:], adapted[12:])  # with the state that the browser kept
    assert "images 24" in tab.locator("#status").inner_text()
    tab.locator("#adapted").uncheck()
    check(tab, "source", frames, source)
    tab.locator("#adapted").check()
    tab.locator("#reset").click()
    check(tab, "adapted", frames[:3], adapted[:3])
    if folder := os.environ.get("SCREENSHOTS"):
        tab.screenshot(path=Path(folder) / "device.png")
