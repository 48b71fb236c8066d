"""Without any one of the five parts, and without all, the core works, and what is gone is absent, not broken."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
PARTS = ("baselines", "zero_shot", "formats", "deployment", "lab")
WITHOUT = [(), *((part,) for part in PARTS), PARTS]

OPTIONS = "adapt --help-all"
ADAPT = "adapt frames --model test_vit --checkpoint vit.safetensors -b 4"
LINES = (
    "--help",
    f"{ADAPT} --output run",
    "apply run --checkpoint vit.safetensors --output adapted.safetensors",
    "inspect run",
    "methods",
    "methods rem",
    "models test_vit",
    OPTIONS,
)
"""Command lines of the core."""

OF_PARTS = {
    "baselines": [f"{ADAPT} --method eata --output eata"],
    "zero_shot": [f"{ADAPT} --method watt --output watt", "adapt frames --model clip:ViT-B-16/openai"],
    "formats": [
        "adapt frames --model vit.onnx",
        "export run --format timm --output exported",
        f"{ADAPT} --publish published.onnx --output publishing",
    ],
    "deployment": [f"{ADAPT} --health health.json --output health", "inspect streams"],
    "lab": ["eval frames", "adapt frames --model remtta-demo --output demo", "inspect evaluation"],
}
"""Command lines that need a part, tried without it."""

GONE = {
    "baselines": {"methods": ["eata", "cotta"], OPTIONS: ["eata"]},
    "zero_shot": {"--help": ["text-embed"], "methods": ["watt"], OPTIONS: ["--prompts", "WEIGHTS"]},
    "formats": {"--help": ["export"], OPTIONS: ["--provider", "ONNX"]},
    "deployment": {OPTIONS: ["--health", "--mqtt", "--publish", "--streams"]},
    "lab": {
        "--help": ["eval", "doctor", "demo", "bench", "report", "score", "corrupt"],
        "methods": ["supervised"],
        OPTIONS: ["remtta-demo", "--save-frames"],
    },
}
"""Words that help and lists have only with a part."""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the command lines and the library did in copies of the package without parts, by the parts that are gone."""
    import timm
    import torch
    from safetensors.torch import save_file

    from tests.conftest import draw_folder

    root = tmp_path_factory.mktemp("parts")
    torch.manual_seed(0)
    save_file(timm.create_model("test_vit").state_dict(), root / "vit.safetensors")
    draw_folder(root / "frames", range(12))
    (root / "vit.onnx").touch()
    for name, record in (("evaluation", "results.json"), ("streams", "site.json")):
        (root / name).mkdir()
        (root / name / record).write_text("{}")
    for parts in WITHOUT:
        folder = root / "+".join(["without", *parts])
        shutil.copytree(ROOT / "remtta", folder / "remtta", ignore=shutil.ignore_patterns("__pycache__"))
        for part in parts:
            shutil.rmtree(folder / "remtta" / part)
        for name in ("vit.safetensors", "vit.onnx", "frames", "evaluation", "streams"):
            (folder / name).symlink_to(root / name)
    env = {**os.environ, "TERMINAL_WIDTH": "200", "PYTHONPATH": str(ROOT), "REMTTA_CACHE": str(root / "cache")}
    command = [sys.executable, "-m", "tests.test_parts", *(str(folder) for folder in sorted(root.glob("without*")))]
    subprocess.run(command, cwd=ROOT, env=env, check=True, timeout=600)
    return {path.parent.name: json.loads(path.read_text()) for path in root.glob("*/told.json")}


def use_of(parts: Sequence[str], told: dict[str, Any]) -> dict[str, Any]:
    used: dict[str, Any] = told[name_of(parts)]
    assert "broken" not in used, used["broken"]
    return used


def name_of(parts: Sequence[str]) -> str:
    return "+".join(["without", *parts])


@pytest.mark.parametrize("parts", WITHOUT, ids=name_of)
def test_the_core_works_and_predicts_the_same(parts: Sequence[str], told: dict[str, Any]) -> None:
    without, whole = use_of(parts, told), use_of((), told)
    assert {line: without[line][0] for line in LINES} == dict.fromkeys(LINES, 0), without
    assert without["python"] == whole["python"] and len(whole["python"]["labels"]) == 12
    assert without["rows"] == whole["rows"]


@pytest.mark.parametrize("parts", WITHOUT[1:], ids=name_of)
def test_what_is_gone_is_absent_and_not_broken(parts: Sequence[str], told: dict[str, Any]) -> None:
    without, whole = use_of(parts, told), use_of((), told)
    for part, gone in GONE.items():
        for line, words in gone.items():
            assert {*words} <= words_of(whole[line]), line
            assert {*words} & words_of(without[line]) == (set() if part in parts else {*words}), line
    for part in parts:
        for line in OF_PARTS[part]:
            code, out, err = without[line]
            errors = [text for text in err.splitlines() if text.startswith("Error: ")]
            assert (code, out, len(errors)) == (2, "", 1), (line, err)


def words_of(told: tuple[int, str, str]) -> set[str]:
    return {*re.findall(r"[\w-]+", told[1])}


def use(folder: Path) -> Iterator[tuple[str, Any]]:
    """Use the package in a folder; yield what came of it by name."""
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    import remtta
    from remtta.cli.application import app

    assert Path(remtta.__file__).parent == folder / "remtta"
    command: Any = typer_command(app)
    gone = [line for part in PARTS if not (folder / "remtta" / part).exists() for line in OF_PARTS[part]]
    for line in [*LINES, *gone]:
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
            try:
                command.main(line.split())
            except SystemExit as end:
                code = end.code or 0
        yield line, (code, out.getvalue(), err.getvalue())
    rows = [json.loads(text) for text in Path("run/predictions.jsonl").read_text().splitlines()]
    yield "rows", [(Path(row["source"]).name, row["class"], row["prob"]) for row in rows]
    import torch

    model = remtta.load_model("test_vit", checkpoint="vit.safetensors")
    adapter = remtta.Adapter(model, batch_size=4)
    probs = adapter(torch.ones(2, 3, 160, 160))
    labels = [int(result.probs.argmax()) for result in remtta.stream("frames", adapter)]
    yield "python", {"probs": probs.max(-1).values.tolist(), "labels": labels}


def typer_command(app: Any) -> Any:
    import typer

    return typer.main.get_command(app)


def main(folders: Sequence[str]) -> None:
    """Use the package in each folder, in a process forked from this one, which has loaded torch and timm."""
    import timm  # noqa: F401 - takes seconds
    import torch

    torch.set_num_threads(1)
    for folder in map(Path, folders):
        if pid := os.fork():
            assert os.waitpid(pid, 0)[1] == 0, folder
        else:
            try:
                told = dict(use(folder))
            except BaseException:
                told = {"broken": traceback.format_exc()}
            (folder / "told.json").write_text(json.dumps(told))
            os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
