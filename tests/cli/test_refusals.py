"""Bad input gets one clear line and its exit code."""

import errno
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import typer
from safetensors.torch import save_file

from remtta.cli.reporting import command
from tests.command import refusal_of
from tests.conftest import NUM_CLASSES, TINY_OPTIONS, draw_folder, tiny_vit
from tests.lab.evaluation.trees import write_tree


def _errors() -> list[Any]:
    tiny = [*TINY_OPTIONS, "--checkpoint", "tiny.safetensors"]
    other = [part if part != str(NUM_CLASSES) else "9" for part in tiny]
    return [
        (["adapt", "nowhere"], 2, "nowhere: no such file or folder"),
        (["adapt", "empty"], 2, "empty: no images or videos in this folder or below it"),
        (["adapt", "text.mp4", *tiny], 1, "text.mp4 cannot be opened as a video"),
        (["adapt", "text.jpg", *tiny, "-o", "text"], 1, "no readable frame (1 failed; see"),
        (["adapt", "frames", "--model", "vit_tiny_patch16_225"], 2, "did you mean vit_tiny_patch16_224"),
        (["adapt", "frames", *tiny, "--adapt-layers", "0-9"], 2, "no block 9: the model has blocks 0-1"),
        (["adapt", "frames", "--model", "vit_tiny_patch16_224.x"], 2, "choose vit_tiny_patch16_224.augreg"),
        (["adapt", "frames", *tiny, "--predictions", "out.jsonl"], 2, "--predictions takes -"),
        (["adapt", "frames", *tiny, "--device", "cuda:99"], 2, "is not available"),
        (["adapt", "frames", *tiny, "--output", "text.jpg"], 2, "text.jpg is a file"),
        (["adapt", "frames", *tiny, "--output", "n" * 256], 1, "n/results.json: File name too long"),
        (["adapt", "frames", *tiny, "--output", "-"], 2, 'standard output, use "--predictions -"'),
        (["adapt", "frames", *tiny, "--delta", "tiny.safetensors"], 4, "not a remtta delta"),
        (["adapt", "frames", *tiny, "--lr", "0.1", "--set", "lr=0.2"], 2, "--lr and --set lr=... are both given"),
        (["adapt", "frames", *tiny, "--method", "supervised"], 2, "and a stream has none; choose another method"),
        (
            ["adapt", "frames", "--model", "remtta-demo", "--use-ema"],
            2,
            "whole model; leave --use-ema out",
        ),
        (["adapt", "frames", "--model", "empty"], 2, "a folder is local-dir:empty"),
        (["adapt", "frames", *tiny, "--set", "lrr=1"], 2, 'unknown setting of remtta "lrr"; did you mean lr?'),
        (["adapt", "frames", *tiny, "--input-size", "33"], 2, "33 is not a multiple of the patch size 4; choose 32"),
        (["adapt", "frames", *tiny[:-1], "."], 2, ".: a folder; name the file in it"),
        (["adapt", "frames", *other], 4, "the file has 7 classes: see --num-classes"),
        (["apply", "tiny.safetensors", "-o", "out.pth"], 2, "must end in .safetensors"),
        (["inspect", "empty"], 2, "empty holds no run"),
        (["inspect", "."], 2, "there are runs in below"),
        (["adapt", "frames", "--model", "remtta-demo", "--num-classes", "9"], 2, "remtta-demo is a whole model"),
        (
            ["adapt", "frames", "--model", "remtta-demo", "--prompts", "a {}"],
            2,
            "--prompts: only for clip:",
        ),
        (
            ["adapt", (url := "http://127.0.0.1:9/x"), *tiny],
            1,
            f"{url} cannot be opened as a video (Connection refused",
        ),
        (
            ["eval", "c", "--model", "remtta-demo", "--domains", "fog", "--protocol", "rem-paper"],
            2,
            "48 pixels; leave --protocol out",
        ),
        *((["eval", *tiny, *args], 2, text) for args, text in _EVAL),
        *((["corrupt", *args], code, text) for args, code, text in _CORRUPT),
        *((args, 2, text) for args, text in _USE),
        *((args, 2, f"{what} is empty (is a variable of the shell not set?); give a value") for args, what in _EMPTY),
        *((args, 2, f"{shown}: paths are local; mount the bucket, or copy the folder") for args, shown in _ADDRESSES),
    ]


_EVAL: list[tuple[list[str], str]] = [
    (["nowhere"], "nowhere: no such folder"),
    (["text.jpg"], "text.jpg: not a folder; a list is --labels-file"),
    (["plain", "--severity", "3"], "plain has no severities; leave --severity out"),
    (["c", "--methods", "tenth"], 'unknown method "tenth"'),
    (["c", "--methods", "source,tent", "--margin", "0.1"], "none of source, tent has --margin"),
    (["c", "--methods", "rem", "--set", "rem.speed=1"], 'unknown setting of rem "speed"; choose'),
    (["c", "--set", "tent.lr=1"], "with a method of --methods (source, remtta)"),
    (["c", "--scenario", "sudden"], 'unknown scenario "sudden"; choose continual'),
    (["c", "--continual", "--episodic"], "choose one scenario"),
    (["c", "-o", "x", "--overwrite", "--resume"], "--overwrite replaces an evaluation and --resume continues it"),
    (["c", "--scenario", "time-constrained", "--cost-ratio", "inf"], "cost_ratio must be >= 1 and finite"),
    (["c", "--seeds", "a"], "--seeds takes whole numbers"),
    (["c", "--protocol", "mine"], "'mine' is not one of 'rem-paper', 'rem-paper-cifar'"),
    (["c", "--protocol", "rem-paper"], "jpeg_compression; it has fog; name the ones to evaluate with --domains"),
    (["c", "--resize", "some"], "'some' is not one of 'auto', 'always', 'never'"),
    (["c", "--resume"], "name it with --output"),
    (["c", "--batch-size", "0"], "--batch-size"),
    (["c", "--scenario", "gradual", "--severity", "5"], "visits all severities; leave --severity out"),
    (["c", "--imbalance", "10"], "--imbalance belongs to --scenario label-shift; the scenario is continual"),
    (["c", "--cost-ratio", "2"], "--cost-ratio belongs to --scenario time-constrained"),
    (["plain", "--scenario", "gradual"], "these are not there: fog 1, fog 2, fog 3, fog 4, fog 5; choose another"),
    (["c", "--image-list", "nowhere.txt"], "--image-list: nowhere.txt cannot be read"),
    (["c", "--class-map", "nowhere.txt"], "--class-map: nowhere.txt cannot be read"),
    (["empty"], "no images in this folder or below it"),
]
_CORRUPT: list[tuple[list[str], int, str]] = [
    (["nowhere", "out"], 2, "nowhere: no such file or folder"),
    (["empty", "out"], 2, "empty: no images in this folder or below it"),
    (["text.jpg", "out"], 1, "no readable image (1 failed); the first, text.jpg: not an image"),
    (["frames", "text.jpg/out"], 2, "text.jpg is a file, so text.jpg/out cannot be a folder"),
    (["frames", "c", "-c", "fog"], 2, "c/fog exists, but no corrupt.json says how it was made"),
    (["frames", "odd"], 2, "odd/corrupt.json cannot be read as a record of remtta corrupt"),
    (["frames", "out", "-c", "gausian_noise"], 2, "did you mean gaussian_noise?"),
    (["frames", "out", "-s", "x"], 2, "--severity takes whole numbers such as 1,2,3, got x"),
    (["frames", "out", "-s", "0,1"], 2, "severity must be from 1 to 5, got 0"),
    (["frames", "out", "--size", "100000"], 2, "'--size': must be at most 10000"),
]
_USE: list[tuple[list[str], str]] = [
    (["adapt"], "Missing argument 'SOURCE'."),
    (["adapt", "x", "--lrr", "3"], "No such option: --lrr (Possible options: --lr)"),
    (["adapt", "x", "-q", "-v"], "--quiet and --verbose exclude each other"),
    (["apply", "x"], "Missing option '--output' / '-o'."),
    (["adpt"], "No such command 'adpt'. Did you mean 'adapt'?"),
    (["eval", *"abcdef"], "unexpected arguments: b, c, d and 2 more"),
    (["adapt", "frames/1.jpg", "frames/2.jpg", "-q"], "got 2 sources; quote the pattern: 'frames/*.jpg', or name"),
    (["adapt", *(f"{n}.png" for n in range(10_000))], "got 10000 sources; quote the pattern: '*.png', or name the"),
    (
        ["adapt", "a/b", "a/c"],
        "got 2 sources; quote the pattern, or name the folder; for a stream each, list them in a",
    ),
    (["adapt", "a/\x1b[31m\n.jpg", "a/b.jpg", "c"], "got 3 sources; quote the pattern, or name the folder"),
    (["eval", "a", "\x1b[31m\n"], r"unexpected argument: \x1b[31m"),
    (["adapt", "x", "--mean", "0.5,0.5,0.5"], "got 0.5,0.5,0.5; separate them by spaces: --mean 0.5 0.5 0.5"),
    (["adapt", "x", "--device", "gpu"], 'unknown --device "gpu"; choose auto, cpu, mps, or cuda (a GPU of NVIDIA or'),
    (["adapt", "x", "--method", "tent+guard"], "tent+guard: no suffix belongs to --method; use --guard rollback"),
    (["eval", ".", "--methods", "tent+gaurd"], 'unknown suffix "+gaurd"; did you mean +guard?'),
    (["eval", ".", "--methods", "tent+both+both"], "tent+both+both: +both is there twice; leave one out"),
    (["demo", "--frames", "99999999999"], "'--frames': must be at most 10000"),
    (["bench", "--batch-size", "99999999999"], "must be at most 10000"),
    (["adapt", "x", "--mean", "0.5", "0.4"], "--mean takes 3 numbers, or one for all; got 0.5 0.4"),
    (["adapt", "x", "--input-size"], "--input-size takes 2 numbers, or one for all; got none"),
    (["adapt", "x", "--threads", "1000000"], "Invalid value for '--threads': must be at most "),
    (["adapt", "x", "--steps", "9" * 21], "Invalid value for '--steps': must be at most 10000"),
    (["adapt", "x", "--reset-every", "1.5"], "Invalid value for '--reset-every': must be a whole number"),
    (["adapt", "x", "--lr", "fast"], "Invalid value for '--lr': must be a number"),
    (["eval", "c", "--methods", "rem", "--set", "rem.steps=1000000"], "steps must be from 1 to 10000"),
    (["models", "levit_12"], 'no listed family has "levit_12" in its name; name one model, such as levit_128'),
    (["models", "no such thing"], 'no timm model or listed family has "no such thing" in its name'),
    (["bench", "--methods", "cotta"], "cannot measure cotta; choose from forward, source, tent"),
    (["bench", "--model", "vit_nonsense"], 'unknown model "vit_nonsense"'),
]
_EMPTY = [
    (["adapt", "x", "--output="], "--output"),
    (["adapt", "x", "-o", ""], "-o"),
    (["adapt", ""], "an argument"),
    (["eval", "x", "--methods", ""], "--methods"),
    (["corrupt", "", "y"], "an argument"),
]
_ADDRESSES = [
    (["eval", "s3://bucket/c"], "s3://bucket/c"),
    (["eval", "c", "--output", "gcs://me:secret@bucket/t"], "gcs://***@bucket/t"),
    (["corrupt", "c", "simplecache::s3://bucket/c"], "simplecache::s3://bucket/c"),
    (["report", "run1", "file:///run2", "-o", "page.html"], "file://run2"),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of what is good and what is not."""
    root = tmp_path_factory.mktemp("place")
    draw_folder(root / "frames", range(2))
    save_file(tiny_vit().state_dict(), root / "tiny.safetensors")
    for name in ("empty", "below", "odd"):
        (root / name).mkdir()
    (root / "below" / "run.json").write_text("{}")
    (root / "odd" / "corrupt.json").write_text('{"corruptions": {"../..": {}}, "settings": 1}')
    write_tree(root / "c", ["fog"], each=1)
    write_tree(root / "plain", ["fog"], severities=(), each=1)
    (root / "text.mp4").write_text("no video")
    (root / "text.jpg").write_text("no image")
    return root


@pytest.mark.parametrize(
    ("args", "code", "text"),
    _errors(),
    ids=lambda value: " ".join(value[:1] + value[-3:]) if isinstance(value, list) else None,
)
def test_bad_input_gets_one_clear_line_and_its_exit_code(
    args: Sequence[str],
    code: int,
    text: str,
    place: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(place)
    before = set(place.rglob("*"))
    told = refusal_of(capfd, *args, code=code)
    assert text in told
    made = {path.relative_to(place).parts[0] for path in set(place.rglob("*")) - before}
    assert made <= {"text", "out"}


def test_a_folder_that_may_not_be_entered_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    """Root may enter all folders, so this is as the operating system would say it to others."""
    with pytest.raises(typer.Exit) as ended, command():
        raise PermissionError(errno.EACCES, "Permission denied", "private/run1")
    assert (ended.value.exit_code, capfd.readouterr().err) == (1, "Error: private/run1: Permission denied\n")
