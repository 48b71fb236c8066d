import contextlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import sqlite3
import subprocess
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file

import remtta
from remtta.lab.evaluation.datasets import open_dataset
from tests.command import remtta_here
from tests.conftest import NUM_CLASSES, TINY, TINY_OPTIONS, draw_video
from tests.lab.evaluation.trees import write_tree
from tests.records import rows_of
from tests.runs.tiny import adapt_tiny, stop_after
from tests.test_documents import is_taken

EXAMPLES = Path(__file__).parent.parent / "examples"
DOCS = EXAMPLES.parent / "docs"
FIGURES = json.loads((DOCS / "figures.json").read_text())
FIVE_EACH = [number // 5 for number in range(20)]


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def example(name: str, monkeypatch: pytest.MonkeyPatch, checkpoint: Path) -> ModuleType:
    """An example script whose models are the tiny random one."""
    module = script(name)

    def load_tiny(_: object, **__: Any) -> Any:
        return remtta.load_model(
            "vit_tiny_patch16_224", checkpoint=checkpoint, num_classes=NUM_CLASSES, model_kwargs=TINY
        )

    name = "load_base" if hasattr(module, "load_base") else "load_model"
    monkeypatch.setattr(module, name, load_tiny)
    return module


def test_a_linear_probe_is_a_whole_checkpoint(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tree(tmp_path / "photographs", ["."], severities=(), classes=("blue", "green", "red"), each=5)
    probe, output = example("linear_probe", monkeypatch, checkpoint), tmp_path / "probe.safetensors"
    probe.main([str(tmp_path / "photographs"), str(output), "--model", "vit_tiny_patch16_224"])
    assert capsys.readouterr().out.startswith("15 images of 3 classes (blue, green, red); ")
    model = remtta.load_model("vit_tiny_patch16_224", checkpoint=output, num_classes=3, model_kwargs=TINY)
    before, after = load_file(checkpoint), model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before if not name.startswith("head."))
    assert after["head.weight"].shape[0] == 3 and after["head.weight"].abs().max() > 0


def test_estimates_need_only_logits() -> None:
    measure = script("measure_estimates")
    logits = torch.randn(measure.MIN_FRAMES, 4, generator=torch.Generator().manual_seed(0))
    clean = measure.Predictions(logits, logits.argmax(1))
    sure, unsure = (measure.ours(clean)(scale * logits) for scale in (1, 0.1))
    assert 0 <= unsure < sure <= 1


def test_all_tables_makes_what_is_missing_once(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tables, out, called = script("all_tables"), tmp_path / "out", list[str]()
    write_tree(tmp_path / "data" / "photographs", ["."], severities=())
    arguments = f"{{out}}/c --batch-size 10 --methods source,tent --checkpoint {checkpoint} {shlex.join(TINY_OPTIONS)}"
    monkeypatch.setitem(tables.LISTED["inputs"], "c", "corrupt {data}/photographs {out}/c -c fog,snow+fog --jobs 1")
    table = {"title": "One", "needs": ["c"], "cases": {"a case": arguments}}
    monkeypatch.setattr(tables, "TABLES", {"one": table})

    def call(words: list[str]) -> None:
        called.append(words[0])
        assert remtta_here(*words) == 0

    monkeypatch.setattr(tables, "call", call)
    told = []
    for _ in range(2):
        tables.main([str(tmp_path / "data"), str(out), "--limit", "14"])
        told.append(capsys.readouterr().out.partition("### One")[2])
    assert called == ["corrupt", "eval", "corrupt"]
    figures = json.loads((out / "figures.json").read_text())["one"]["a case"]
    errors = json.loads((out / "one" / "a_case" / "results.json").read_text())["methods"]
    assert figures["images"] == 28 and figures["methods"]["tent"]["error"] == round(errors["tent"]["mean"], 1)
    assert f"| a case | `source` | {errors['source']['mean']:.1f} ± " in told[1]
    first = errors["tent"]["first"]
    worst = max(0 - gain for gain in first["gain_by_domain"].values())
    assert figures["methods"]["tent"]["first"] == {
        name: round(value, 1) for name, value in (("error", first["mean"]), ("gain", first["gain"]), ("worst", worst))
    }
    assert f"| {first['gain']:+.1f}, {worst:+.1f} | {figures['methods']['tent']['passes']} |" in told[1]


def test_first_frames_are_not_those_that_are_tested(tmp_path: Path) -> None:
    classes = [f"class_{number}" for number in range(60)]
    write_tree(tmp_path / "photographs_c", ["fog"], classes=classes, each=5, size=4)
    script("all_tables").split_first(tmp_path)
    parts = (tmp_path / "first_frames").iterdir()
    found = {part.name: {image.resolve() for image in part.rglob("*.png")} for part in parts}
    assert [len(found[name]) for name in ("test", "first16", "first64", "common_classes")] == [200, 16, 64, 60]
    assert found["first16"] < found["first64"] and not found["first64"] & found["test"]
    common, other = ({image.parent.name for image in found[name]} for name in ("common_classes", "other_classes"))
    assert not common & other


def test_centered_logits_by_the_order_of_classes(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = write_tree(tmp_path / "c", ["fog", "snow"], each=2)
    measure = example("measure_orders", monkeypatch, checkpoint)
    measure.main([str(tree), "--checkpoint", "", "--streams", "2"])
    rows = capsys.readouterr().out.splitlines()
    assert [row.split(" | ")[0] for row in rows[2:]] == [f"| {name}" for name in measure.STREAMS]

    dataset = open_dataset(tree, num_classes=NUM_CLASSES)
    drawn = {name: measure.stream(dataset, options, 0) for name, options in measure.STREAMS.items()}
    labels = {name: [dataset.domains[domain].labels[place] for domain, place in items] for name, items in drawn.items()}
    assert [len(set(labels[name])) for name in drawn if "throughout" in name] == [3, 2, 1]
    changes = [(np.diff(drawn[name][:, 0]) != 0).sum() for name in ("shuffled", "domains mixed in a batch")]
    assert changes[0] == 1 < changes[1]


def test_every_table_is_of_commands_that_are_there() -> None:
    tables = script("all_tables")
    for name, table in tables.TABLES.items():
        assert set(table["needs"]) <= tables.LISTED["inputs"].keys()
        measured, cases = FIGURES.get(name, {}), table["cases"]
        assert list(measured) == list(cases)
        for case, arguments in cases.items():
            command = tables.expanded(arguments)
            whole = f"python examples/{command}" if tables.is_script(command) else f"remtta eval {command}"
            assert measured[case]["command"] == whole
            if not tables.is_script(command):
                assert is_taken("eval", command.format(data="data", out="out").split())


def test_a_script_prints_its_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = script("all_tables")
    monkeypatch.setattr(tables, "TABLES", {"one": {"title": "One", "needs": [], "cases": {"a case": "printing.py"}}})
    monkeypatch.setattr(tables, "EXAMPLES", tmp_path)
    (tmp_path / "printing.py").write_text("import sys\nprint('| a |', *sys.argv[1:])")
    tables.main([str(tmp_path), str(tmp_path / "out"), "--limit", "3"])
    entry = json.loads((tmp_path / "out" / "figures.json").read_text())["one"]["a case"]
    assert (entry["command"], entry["printed"]) == ("python examples/printing.py --limit 3", "| a | --limit 3\n")


def test_gains_of_a_video_are_clustered_by_photograph() -> None:
    wrong = {"source": [1, 1, 0, 0, 1, 1], "tent": [0, 0, 0, 0, 1, 0]}
    rows = [{"method": name, "class": each, "label_true": 0} for name, wrongs in wrong.items() for each in wrongs]
    errors = script("all_tables").gain_errors(rows, 2)
    assert errors == {"source": 0, "tent": round(100 * float(np.std([1, 0, 0.5], ddof=1)) / 3**0.5, 1)}


def test_a_panned_walk_is_frames_of_each_photograph_in_conditions_that_set_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tree(tmp_path / "photographs", ["."], severities=(), classes=("cat", "dog", "ship"), each=2)
    walk = script("make_walk")
    assert walk.fading(2) == [(2, 0), (1, 0), (0, 0), (0, 1), (0, 2)]
    args = ["--severity", "2", "--pan", "5", "--images", "30", "--speed", "4", "--num-classes", "3"]
    for folder in ("one", "same"):
        monkeypatch.setattr("sys.argv", ["make_walk", str(tmp_path / "photographs"), str(tmp_path / folder), *args])
        walk.main()
    (domain,) = open_dataset(tmp_path / "one", num_classes=3).domains
    labels = domain.labels.reshape(6, 5)
    assert (labels == labels[:, :1]).all()
    frames = [domain.load(number).tobytes() for number in range(5)]
    assert len(set(frames)) == 5
    names = [tmp_path / folder / "serial_00000.tar" for folder in ("one", "same")]
    assert len({open_dataset(name.parent, num_classes=3).domains[0].load(7).tobytes() for name in names}) == 1


def test_own_loop_continues_from_its_state(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    video, state = str(draw_video(tmp_path / "clip.avi", FIVE_EACH)), tmp_path / "adapter.pt"
    told, states = [], []
    for _ in range(2):
        example("own_loop", monkeypatch, checkpoint).main([video, "--batch-size", "8", "--state", str(state)])
        told.append(capsys.readouterr().out.splitlines())
        states.append(state.read_bytes())
    assert [line.count(",") + 1 for line in told[0][:3]] == [8, 8, 4]
    assert float(told[0][3].rpartition(": ")[2]) > 0
    assert states[0] != states[1]  # a second run from the source weights would write the same


def test_a_service_learns_from_requests_and_continues_where_it_was(
    frames: Path, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = pytest.importorskip("fastapi.testclient")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", Image.MAX_IMAGE_PIXELS)  # the service lowers it
    service = example("serve", monkeypatch, checkpoint)
    clear = Image.new("RGBA", (40, 36))
    clear.putpixel((0, 0), (255, 255, 255, 255))  # without any, the alpha channel would not be used
    clear.save("clear.png")
    Image.new("RGB", (40, 36), "white").save("white.png")
    paths = [*sorted(frames.iterdir())[:6], Path("clear.png"), Path("white.png")]
    sent = [("images", path.read_bytes()) for path in paths]
    with client.TestClient(service.app) as http:
        rows = http.post("/predict", files=sent).json()
        assert rows[6] == pytest.approx(rows[7])  # as everywhere, transparent pixels are white
        assert len(rows) == 8 and all(row.keys() == {"class", "prob"} for row in rows)
        program = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n"  # for Ghostscript
        refused = http.post("/predict", files=[("images", program)])
        assert refused.status_code == 422 and "no image: cannot identify" in refused.json()["detail"]
        learned = service.app.state.adapter.delta()
    with client.TestClient(service.app):
        delta = service.app.state.adapter.delta()
    assert any(tensor.any() for tensor in delta.values())
    assert all(torch.equal(delta[name], tensor) for name, tensor in learned.items())


def test_adapt_video_and_restore_delta(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    video, run = str(draw_video(tmp_path / "clip.avi", FIVE_EACH)), tmp_path / "run"
    example("adapt_video", monkeypatch, checkpoint).main([video, "--every", "2", "--output", str(run)])
    assert "10 frames, 10 predicted, 0 skipped, 1 update, " in capsys.readouterr().out
    example("restore_delta", monkeypatch, checkpoint).main([str(run / "delta.safetensors")])
    assert capsys.readouterr().out.endswith(
        "11 adapted tensors, from 4 frames of remtta\n"
    )  # without the repeated ones


def test_rows_are_in_a_database_once_also_of_a_run_that_continues(frames: Path, tmp_path: Path) -> None:
    callback = script("sqlite_rows").SqliteRows(str(tmp_path / "rows.db"))
    stop_after(2, frames, tmp_path / "run")
    adapt_tiny(frames, tmp_path / "run", resume=True, callbacks=[callback])
    adapt_tiny(frames, tmp_path / "again", callbacks=[callback])
    with contextlib.closing(sqlite3.connect(tmp_path / "rows.db")) as database:
        stored = database.execute("SELECT frame, row FROM predictions ORDER BY frame").fetchall()
    assert [(frame, json.loads(row)) for frame, row in stored] == list(enumerate(rows_of(tmp_path / "again")))


@pytest.fixture
def classes(tmp_path: Path) -> Path:
    """A folder of data to train on: four images of each of three classes, and one to test on."""
    for part, count in (("train", 4), ("test", 1)):
        write_tree(tmp_path / "data" / part, ["."], severities=(), classes=("cat", "dog", "ship"), each=count)
    return tmp_path / "data"


def told_error(capsys: pytest.CaptureFixture[str]) -> float:
    """The test error in the last line, in percent."""
    return float(capsys.readouterr().out.splitlines()[-1].partition("test error ")[2].partition(" %")[0])


def test_a_cifar10_model_is_trained_and_loads(
    classes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module, output = script("train_cifar10_model"), tmp_path / "model.safetensors"
    assert " ".join(f"{name}={value}" for name, value in module.MODEL_KWARGS.items()) in str(module.__doc__)
    monkeypatch.setitem(module.MODEL_KWARGS, "depth", 1)
    options = ["--epochs", "2", "--mixup", "0.2", "--batch-size", "6", "--workers", "0"]
    module.main([str(classes), str(output), *options])
    kwargs, transform = module.MODEL_KWARGS, module.transform(augment=False)
    model = remtta.load_model("vit_tiny_patch16_224", checkpoint=output, num_classes=3, model_kwargs=kwargs)
    paths = sorted((classes / "test").glob("*/*.png"))
    guesses = model(torch.stack([transform(Image.open(path)) for path in paths])).argmax(1)
    wrong = (guesses != torch.arange(3)).float().mean()
    assert told_error(capsys) == pytest.approx(100 * wrong.item(), abs=0.01)
    (classes / "test" / "dog").rename(classes / "test" / "horse")
    with pytest.raises(SystemExit, match="do not have the same classes"):
        module.main([str(classes), str(output), *options])


def test_a_tiny_clip_starts_from_a_vit_is_trained_and_loads(
    classes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module, output = script("train_cifar10_clip"), tmp_path / "model"
    monkeypatch.setitem(module.MODEL["vision_cfg"], "layers", 2)
    vit = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=4, depth=2, num_classes=0)
    clip: Any = module.open_clip.CLIP(**module.MODEL)
    module.start_from(vit.state_dict(), clip.visual)
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(clip.visual(images), vit(images) @ clip.visual.proj, rtol=1e-4, atol=1e-4)
    module.main([str(classes), str(output), "--minutes", "0.001", "--batch-size", "6"])
    assert told_error(capsys) >= 0
    model: Any = remtta.load_model(f"clip:{output}", labels=["a", "b"], prompts="watt")
    assert model(images).shape == (2, 2)


def test_examples_use_only_public_names() -> None:
    for name in ("own_loop", "adapt_video", "restore_delta", "serve", "sqlite_rows"):
        text = (EXAMPLES / f"{name}.py").read_text()
        assert "from remtta import" in text
        assert "from remtta." not in text


def test_the_service_uses_options_that_exist() -> None:
    unit = (EXAMPLES / "remtta.service").read_text().replace("\\\n", " ")
    _, command, *words = re.findall("^ExecStart=(.*)$", unit, re.MULTILINE)[0].split()
    assert {"--resume", "--reconnect-for"} <= set(words) and is_taken(command, words)
    assert "RestartPreventExitStatus=2 4 5" in unit


NEEDS_JQ = pytest.mark.skipif(shutil.which("jq") is None or shutil.which("bash") is None, reason="needs jq and bash")


def pipeline(tools: Path, *args: str | Path, remtta: str, inotifywait: str = "exit 0") -> list[str | Path]:
    """The command of the example with programs of its own; the shell's PATH is to begin with their folder."""
    tools.mkdir()
    for name, text in (("inotifywait", inotifywait), ("remtta", remtta)):
        (tools / name).write_text(f"#!/bin/sh\n{text}\n")
        (tools / name).chmod(0o755)
    path = f"PATH={tools}:{os.environ['PATH']}"
    return ["env", path, "bash", EXAMPLES / "pipeline.sh", *args]


@NEEDS_JQ
def test_the_pipeline_tells_about_doubtful_and_broken_files(
    frames: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its remtta prints the rows of a run in this process; that the command takes the words it gets is looked at."""
    (frames / "\x1bbroken.png").write_bytes(b"no image")
    adapt_tiny(frames, tmp_path / "made")
    monkeypatch.chdir(tmp_path)
    find = 'for last; do :; done; find "$last" -name "*.png"'
    tell = 'printf "%s\\n" "$@" > words; cat > paths; cat made/predictions.jsonl'
    tools, runs = tmp_path / "tools", tmp_path / "runs"
    shown = pipeline(tools, frames, runs, *TINY_OPTIONS, inotifywait=find, remtta=tell)
    done = subprocess.run(shown, capture_output=True, text=True, check=True)
    command, *words = Path("words").read_text().splitlines()
    assert is_taken(command, words)
    assert {Path(line) for line in Path("paths").read_text().splitlines()} == set(frames.iterdir())
    doubtful = [row for row in rows_of(tmp_path / "made") if "error" in row or row["prob"] < 0.5]
    assert len(done.stdout.splitlines()) == len(doubtful) > 1
    assert f"{frames}/?broken.png: not an image that Pillow can read" in done.stdout


@NEEDS_JQ
@pytest.mark.parametrize(("remtta", "code"), [("exit 4", 4), ("echo '[1]'", 5), ("exit 0", 0)])
def test_the_pipeline_ends_with_the_exit_code_of_what_failed(remtta: str, code: int, tmp_path: Path) -> None:
    command = pipeline(tmp_path / "tools", tmp_path, tmp_path / "runs", remtta=remtta)
    done = subprocess.run(command, capture_output=True)
    assert done.returncode == code, done.stderr


@NEEDS_JQ
def test_a_reader_that_has_seen_enough_of_the_pipeline_is_no_failure(tmp_path: Path) -> None:
    rows = """trap '' PIPE; while echo '{"source": "a.png", "class": 3, "prob": 0.2}' 2> /dev/null; do :; done"""
    command = pipeline(tmp_path / "tools", tmp_path, tmp_path / "runs", remtta=f"{rows}; exit 0")
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"a.png: 3 at 20 %, doubtful\n"
        process.stdout.close()
        assert process.wait(60) == 0


HALF = "half=remtta"
"""`remtta --adapt-every 2` in tables.toml."""

README_ROWS = {
    "ViT-Ti, ImageNet photographs, 3": ("imagenet", "vit, severity 3"),
    "ViT-Ti, ImageNet photographs, 5": ("imagenet", "vit, severity 5"),
    "DeiT-Ti, ImageNet photographs, 3": ("imagenet", "deit, severity 3"),
    "DeiT-Ti, ImageNet photographs, 5": ("imagenet", "deit, severity 5"),
    "EfficientNet-Lite0, ImageNet photographs, 5": ("lite", "severity 5"),
    "ViT-Ti, photographs to paintings, cartoons, sketches (PACS)": ("pacs", "vit"),
    "DeiT-Ti, the same": ("pacs", "deit"),
    "EfficientNet-Lite0, the same": ("pacs", "lite"),
    "small ViT, CIFAR-10, 5": ("cifar10", "1,000 images of each"),
}
"""How a row of README's table begins, and the table and case of docs/figures.json that it is of."""


@pytest.mark.parametrize("start", README_ROWS)
def test_readme_has_the_figures_of_an_evaluation(start: str) -> None:
    table, case = README_ROWS[start]
    methods = FIGURES[table][case]["methods"]
    (row,) = re.findall(rf"^\| {re.escape(start)} \|(.*)\|$", (DOCS.parent / "README.md").read_text(), re.MULTILINE)
    errors = [cell.strip(" *") for cell in row.split("|")]
    assert errors == [f"{methods[name]['error']:.1f}" for name in ("source", "fast", HALF, "remtta")]


def told(row: dict[str, Any], digits: int | None = 1) -> str:
    """A cell of docs/results.md: digits of the worst domain; without it (None)."""
    if row["worst"] is None:
        return f"{row['error']:.1f}"
    gain = f"{row['error']:.1f}: {row['gain']:.1f} ± {row['gain_se']:.1f}"
    if digits is None:
        return gain
    worst = f"{row['worst']:+.{digits}f}" if row["worst"] else f"{0:.{digits}f}"
    return f"{gain} ({worst}, {row['worse']})"


def rows_after(start: str, name: str = "results.md") -> list[list[str]]:
    """The cells of the rows of the first table after these words on a page."""
    page = (DOCS / name).read_text().partition(start)[2]
    _, _, *rows = re.search(r"(?:^\|.*\n)+", page, re.MULTILINE)[0].splitlines()  # type: ignore[index]
    return [[cell.strip(" *`") for cell in line.strip("|").split("|")] for line in rows]


def test_results_have_the_figures_of_photographs() -> None:
    rows = [row for row in rows_after("## ImageNet photographs") if "imagecorruptions" not in row[0]]
    assert len(rows) == 4
    for label, *cells in rows:
        figures = FIGURES["imagenet"][re.sub("(ViT|DeiT)-Ti", lambda found: found[1].lower(), label)]["methods"]
        assert cells == [told(figures[name]) for name in ("source", "rem", "fast", HALF, "remtta")]


def test_results_have_the_figures_of_the_ablation() -> None:
    keys = ["rem", "crem=rem", "nrem=rem", "chrem=rem", "brem=rem+both", "remtta", "today", "hrem=rem"]
    keys += ["lt=light", "broid=roid+both"]
    entries = [FIGURES["ablation"][f"{name}, severity 5"] for name in ("vit", "deit")]
    cases = [{**entry["methods"], "today": entry["today"]["remtta"]} for entry in entries]
    assert [cells for _, *cells in rows_after("## Ablation")[1:]] == [[told(own[key]) for own in cases] for key in keys]


def test_results_have_the_figures_of_orders() -> None:
    printed = [each["printed"] for each in FIGURES["streams"].values()]
    found = [[line.strip("| ").split(" | ") for line in each.splitlines()[2:]] for each in printed]
    for row, *models in zip(rows_after("## Orders of frames")[:-1], *found, strict=True):  # without the means
        cells = (cell for _, _, plain, centered in models for cell in (plain.partition(" ")[0], centered))
        assert row[1:] == [re.sub(r"^[+-]0\.0", "0.0", cell) for cell in cells]


@pytest.mark.parametrize(
    ("start", "table"),
    [
        ("## Hard streams", "hard_small_vit"),
        ("**The ViT-Ti**, on the photographs", "hard_vit"),
        ("**The EfficientNet-Lite0**, likewise", "hard_lite"),
    ],
)
def test_results_have_the_figures_of_hard_streams(start: str, table: str) -> None:
    """Of batches of 1, 4 and 20: gains, the change on the worst domain, and the gain on the first images."""
    rows = rows_after(start)
    assert {case for case, *_ in rows} == FIGURES[table].keys()
    for case, source, *cells, error in rows:
        own = FIGURES[table][case]["methods"]
        fast, ours = (
            [own[label] for size in ("+batch1", "+batch4", "") if (label := f"{name}{size}") in own]
            for name in ("fast", "remtta")
        )
        expected = [
            [f"{row['gain']:.1f}" for row in fast],
            [f"{row['gain']:.1f}" for row in ours],
            [f"{row['worst']:+.1f}" for row in ours],
            [f"{row['first']['gain']:.1f}" for row in ours],
        ]
        assert (source, error) == (f"{own['source']['error']:.1f}", f"{own['remtta']['gain_se']:.1f}")
        assert cells == [", ".join(each) for each in expected]


@pytest.mark.parametrize(
    ("heading", "page", "table", "case"),
    [
        ("CIFAR-10", "results.md", "cifar10", "1,000 images of each"),
        ("Measured", "clip.md", "clip", "100 images of each"),
    ],
)
def test_results_have_the_figures_of_cifar10(heading: str, page: str, table: str, case: str) -> None:
    methods = FIGURES[table][case]["methods"]
    assert {name: error for name, error, _ in rows_after(f"## {heading}\n", page)} == {
        "--adapt-every 2" if name == HALF else name: told(row) for name, row in methods.items()
    }


def test_results_have_published_methods_at_their_best_rates() -> None:
    cases = [FIGURES["rates"][name]["methods"] for name in ("vit, severity 3", "vit, severity 5", "deit, severity 5")]
    factors = {"3": " x 3", "10": " x 10", "03": " x 0.3"}
    rows = {name: cells for name, *cells in rows_after("## Published methods")}
    for method in ("tent", "sar", "deyo", "roid"):
        expected = []
        for own, centered in product(cases, ("", "c")):
            names = [f"{centered}{method}{factor}={method}".removeprefix(f"{method}=") for factor in ("", *factors)]
            best = min((name for name in names if name in own), key=lambda name: own[name]["error"])
            factor = best.partition("=")[0].removeprefix(f"{centered}{method}")
            expected.append(told(own[best], None) + factors.get(factor, ""))
        assert rows[method] == expected


CONVOLUTIONAL = {
    "tent": "tent",
    "roid": "roid",
    "sar": "sar",
    "cam": "rem`, by Grad-CAM",
}
"""How a row of the convolutional network's table begins, by the method's name in tables.lite_rates."""


def at_its_best_rate(method: str, case: str) -> tuple[dict[str, Any], str]:
    """The figures of a published method on the convolutional network, and its rate unless it is the published one."""
    entry, published = FIGURES["lite_rates"][case], FIGURES["convolutional"][case]["methods"]
    rates = dict(re.findall(r"--set (\w+)\.lr=(\S+)", entry["command"]))
    own = {name.partition("=")[0]: row for name, row in entry["methods"].items()}
    tried = [(own[name], f" at {rates[name]}") for name in (method, f"{method}3") if name in own]
    tried += [(row, "") for name, row in published.items() if name == {"cam": "gradcam=rem"}.get(method, method)]
    return min(tried, key=lambda each: each[0]["error"])


def test_results_have_the_figures_of_the_convolutional_network() -> None:
    rows = {name: cells for name, *cells in rows_after("## A convolutional network")}
    cases = ("severity 3", "severity 5")
    for method, name in CONVOLUTIONAL.items():
        assert rows[name] == [told(row, 0) + rate for row, rate in (at_its_best_rate(method, each) for each in cases)]
    for label, method in (("fast", "fast"), ("--adapt-every 2", HALF), ("remtta", "remtta")):
        assert rows[label] == [told(FIGURES["convolutional"][each]["methods"][method], 0) for each in cases]


def test_results_have_the_figures_of_a_natural_shift() -> None:
    cases = {"ViT-Ti": "vit", "DeiT-Ti": "deit", "EfficientNet-Lite0": "lite"}
    for label, mean, gain in rows_after("## A natural shift"):
        if label.endswith(", source"):
            case, method = cases[label.removesuffix(", source")], "source"
        else:
            method = {"--adapt-every 2": HALF}.get(label, label)
        assert (f"{mean}: {gain}" if gain else mean) == told(FIGURES["pacs"][case]["methods"][method], None)


AXES = ("source", "fast", "remtta", "rem", "roid")
RATIOS = (1, 1, 2, 2, 2)
"""The time of an update of each, in frames of a stream a quarter as fast as the source model, rounded up."""


def test_results_have_the_figures_of_deployment() -> None:
    figures = FIGURES
    few, axes = figures["few"], figures["deployment"]
    cases = [*((few[name], "unseen") for name in ("64 frames", "60 frames of other classes"))]
    cases.append((axes["two corruptions at once"], "error"))
    rows = [row[1:] for row in rows_after("## Deployment") if "visit" not in row[0]]  # figures.json has their mean
    expected = [[case["methods"][name][part] for name in AXES] for case, part in cases]
    slower = zip(AXES, RATIOS, strict=True)
    expected.append([axes[f"deadlines, ratio {ratio}"]["methods"][name]["error"] for name, ratio in slower])
    assert rows == [[f"{error:.1f}" for error in row] for row in expected]
