"""The patches that the largest mask hides, beside the frames of the page."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image

from remtta import apply_delta, load_delta, load_model
from remtta.backbones.families import backbone_of
from remtta.drawing import paint_over
from remtta.errors import RemttaError
from remtta.methods.settings import REMConfig
from remtta.models.preprocessing import preprocessing_of
from remtta.report.masks import masked_frames
from remtta.report.pictures import address_of
from tests.command import refusal_of, remtta_here
from tests.conftest import draw_folder, draw_video
from tests.records import json_of, rows_of
from tests.report.test_report import Reader

ADAPT = ["--model", "remtta-demo", "--mask-ratios", "0,0.1,0.4", "--batch-size", "3", "--lr", "0.1", "-q"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on six images, and one on a video of four."""
    root = tmp_path_factory.mktemp("masked")
    draw_folder(root / "frames", range(6))
    draw_video(root / "clip.mp4", range(4))
    for source, run in (("frames", "stills"), ("clip.mp4", "video")):
        assert remtta_here("adapt", root / source, *ADAPT, "--output", root / run) == 0
    return root


def pictures(page: Path) -> list[tuple[str, str]]:
    """Text alternatives and addresses of the page's pictures."""
    return [(each["alt"] or "", each["src"] or "") for tag, each in Reader(page.read_text()).tags if tag == "img"]


def hatched(run: Path) -> dict[int, str]:
    """The addresses of a run's frames under which the 40 % of the patches that get most attention are hatched."""
    model = load_model("remtta-demo")
    apply_delta(model, load_delta(run))
    preprocessing, backbone = preprocessing_of(model), backbone_of(model)
    addresses = {}
    for row in rows_of(run):
        pixels = preprocessing.transform()(Image.open(row["source"]).convert("RGB"))
        with torch.no_grad():
            embedded = backbone.embed(preprocessing.normalise(pixels[None]))
            order = backbone.classify_with_scores(embedded, "attention")[1][0].argsort()
        view = paint_over(pixels.permute(1, 2, 0).numpy(), order[: int(0.6 * len(order))].tolist(), backbone.patch_size)
        addresses[row["index"]] = address_of(Image.fromarray(view))
    return addresses


def test_masked_frames_are_shown_beside_the_originals(runs: Path) -> None:
    expected = hatched(runs / "stills")
    (runs / "frames" / "0.png").unlink()
    assert remtta_here("report", runs / "stills", "--masks", "-o", runs / "stills.html", "-q") == 0
    shown = pictures(runs / "stills.html")
    for (plain, plain_address), (words, masked_address) in zip(shown[::2], shown[1::2], strict=True):
        assert words == f"{plain}; hatched: the patches that the mask hides"
        assert plain_address != masked_address
    addresses = {(int(words.partition(",")[0]), address) for words, address in shown[1::2]}
    assert addresses == {(index, address) for index, address in expected.items() if index}  # the least sure are all
    content = (runs / "stills.html").read_text()
    assert "hatched: the 40 % of the patches that remtta hides at most" in content
    assert "no longer readable" in content


def test_frames_of_a_video_are_shown(runs: Path, tmp_path: Path) -> None:
    assert remtta_here("report", runs / "video", "--masks", "-o", tmp_path / "video.html") == 0
    assert {words.partition(",")[0] for words, _ in pictures(tmp_path / "video.html")} == set("0123")


def test_frames_that_are_all_gone_are_reported(tmp_path: Path) -> None:
    row = {"source": str(tmp_path / "gone.png")}
    with pytest.raises(RemttaError, match=r"none of the 1 frames can be read again, such as .*gone\.png"):
        masked_frames(load_model("remtta-demo"), REMConfig(), lambda: None, [row])


def test_runs_without_masks_are_refused(runs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "x.html"
    (tmp_path / "table").mkdir()
    for folders in ([runs / "stills", runs / "video"], [tmp_path / "table"]):
        refusal = refusal_of(capfd, "report", *folders, "--masks", "-o", target)
        assert refusal == (2, "Error: --masks is for one run of remtta adapt; give its folder alone")
    record = json_of(runs / "stills" / "run.json")
    for part, change, reason in (
        ("method", {"name": "tent", "mask_ratios": None}, "is a run of tent; leave it out"),
        ("method", {"masking": "random"}, "were drawn at random and not recorded"),
        ("source", {"kind": "camera"}, "is a run of a live source"),
    ):
        other = tmp_path / "other"
        shutil.copytree(runs / "stills", other, dirs_exist_ok=True)
        (other / "run.json").write_text(json.dumps({**record, part: {**record[part], **change}}))
        code, told = refusal_of(capfd, "report", other, "--masks", "-o", target)
        assert code == 2 and reason in told
    assert not target.exists()
