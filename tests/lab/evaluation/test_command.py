"""The eval command."""

import re
import sys
from pathlib import Path

import pytest
from safetensors.torch import save_file

from remtta.errors import OutputError
from remtta.lab.evaluation import plots
from tests.command import refusal_of, remtta_here, terminal_of
from tests.conftest import TINY_OPTIONS, raising, tiny_vit
from tests.lab.evaluation.trees import CLASSES, write_tree
from tests.records import json_of, rows_of


def test_the_command_prints_the_fields_lines_and_a_table(
    tiny: list[str], checkpoint: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    root = write_tree(tmp_path / "c", ["fog"])
    methods = ("--methods", "source,tent,rem", "--seeds", "0,1", "--lr", "0.01", "--set", "tent.lr=0.002")
    code = remtta_here("eval", root, "--continual", *methods, *tiny, "--no-plots", "-b", "4", "-o", tmp_path / "run")
    captured = capfd.readouterr()
    assert code == 0, captured.err
    assert captured.err.count("error % [fog5]: ") == 1 + 2 * 2  # the source model runs once
    assert captured.out.splitlines()[0].split() == ["error", "in", "%", "source", "tent", "rem"]
    results = json_of(tmp_path / "run" / "results.json")
    assert results["settings"]["methods"]["tent"]["lr"] == 0.002
    assert results["settings"]["methods"]["rem"]["lr"] == 0.01
    assert results["settings"]["model"]["checkpoint"] == str(checkpoint)
    assert len(results["settings"]["model"]["base_sha256"]) == 64
    assert {"remtta", "torch", "timm", "python"} <= results["environment"].keys()
    costs = {"source": (1, 0), "tent": (1, 480), "rem": (3, 192)}
    for name, result in results["methods"].items():
        assert (result["forwards_per_image"], result["trainable_parameters"]) == costs[name]
        assert result["timing"]["peak_memory_bytes"] > 10**6


def test_the_tables_of_a_complete_evaluation_can_be_made_with_other_columns(
    tiny: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, root = tmp_path / "run", write_tree(tmp_path / "c", ["fog", "snow"], each=1)
    command = ["eval", str(root), *tiny, "--methods", "source,fast", "--no-plots", "-o", str(run), "--resume"]
    monkeypatch.setattr(sys, "argv", ["/bin/remtta", "eval", "https://me:password@host/c", "--columns", "gain,fog"])
    assert "did you mean fog?" in refusal_of(capfd, *command, "--columns", "gain,fog5")
    assert not run.exists()
    assert remtta_here(*command) == 0
    results, header = json_of(run / "results.json"), "error in % | snow | fog | mean | SE | gain | top-5 error"
    assert results["environment"]["command"] == ["/bin/remtta", "eval", "https://***@host/c", *sys.argv[3:]]
    assert "% remtta eval 'https://***@host/c' --columns gain,fog\n" in (run / "table.tex").read_text()
    assert (run / "table.md").read_text().startswith(f"| {header} ")
    assert '--columns has "fog" twice' in refusal_of(capfd, *command, "--columns", "domains,fog")
    monkeypatch.setattr(sys, "argv", ["/bin/remtta", "eval", "c", "--resume", "--columns", "gain,fog"])
    assert remtta_here(*command, "--columns", "gain,fog") == 0
    assert capfd.readouterr().out.splitlines()[0].split() == ["error", "in", "%", "source", "fast"]
    assert (run / "table.md").read_text().startswith("| error in % | gain | fog |\n")
    assert r"Error in \% & Gain & Fog \\" in (run / "table.tex").read_text()
    assert "% remtta eval c --resume --columns gain,fog\n" in (run / "table.tex").read_text()
    assert json_of(run / "results.json") == results


def test_on_a_terminal_a_bar_tells_the_progress_of_each_run_within_a_domain(
    tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = write_tree(tmp_path / "c", ["fog", "snow"])
    terminal = terminal_of(monkeypatch)
    options = ("--methods", "source,tent", "--seeds", "0,1", "--no-plots", "-b", "4", "-o", tmp_path / "run")
    assert remtta_here("eval", root, *tiny, *options) == 0
    shown = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", terminal.getvalue())
    assert "reading class names" not in shown  # only of a zero-shot model
    for bar in ("source, seed 0", "tent, seed 0", "tent, seed 1"):
        assert re.search(rf"{bar} \S+ 42/42 \d+\.\d images/s, fog5 ", shown)
    runs = ["source, images shuffled by seed 0", *(f"tent, images shuffled by seed {seed}" for seed in (0, 1))]
    assert re.findall(r"run \d of .*?seed \d", shown) == [f"run {n} of 3: {run}" for n, run in enumerate(runs, 1)]


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        (("--domains", "rain"), r"has no domain rain; it has snow, fog; name"),
        (("--severity", "3"), r"has no severities; leave --severity out"),
        (("--domains", "fog,fog"), r"domain fog is given twice"),
        (("--image-list", "no.txt"), r"no\.txt"),
        (("--class-map", "no.txt"), r"no\.txt"),
        (("--labels-file", "no.txt", "--class-order", "name"), r"--labels-file names the images; leave --class-order"),
    ],
)
def test_a_tree_that_cannot_be_evaluated_is_refused_before_the_model_is_loaded(
    options: tuple[str, ...], refusal: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    root = write_tree(tmp_path / "c", ["fog", "snow"], severities=(), each=1)
    missing = ("--checkpoint", "missing.safetensors", "-o", tmp_path / "run")
    assert re.search(refusal, refusal_of(capfd, "eval", root, *missing, *options))
    assert "missing.safetensors" in refusal_of(capfd, "eval", root, *missing)


def test_a_folder_without_labelled_images_is_refused_before_the_model_is_loaded(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    root = write_tree(tmp_path / "c", ["fog"], severities=(), each=1)
    (tmp_path / "empty").mkdir()
    for folder, refusal in ((tmp_path / "empty", "no images in"), (root / "fog" / "class_a", "without class folders")):
        assert refusal in refusal_of(capfd, "eval", folder, "--checkpoint", "missing.safetensors")


@pytest.mark.parametrize(
    ("protocol", "size", "crop_pct", "batch_size"),
    [("rem-paper", 224, 224 / 256, 50), ("rem-paper-cifar", 384, 1.0, 20)],
)
def test_a_protocol_sets_inputs_and_batch(
    protocol: str, size: int, crop_pct: float, batch_size: int, tmp_path: Path
) -> None:
    root = write_tree(tmp_path / "c", ["fog"], each=1, size=size)  # which would be used as they are otherwise
    checkpoint = tmp_path / "coarse.safetensors"
    save_file(tiny_vit(patch_size=16).state_dict(), checkpoint)
    tiny = [*TINY_OPTIONS[:-2], "--model-kwargs", "patch_size=16"]  # without --crop-pct
    options = ["--domains", "fog", "--limit", "1", "--methods", "source", "--no-plots", "--protocol", protocol]
    assert remtta_here("eval", root, *tiny, "--checkpoint", checkpoint, *options, "-o", tmp_path / "run") == 0
    found = json_of(tmp_path / "run" / "results.json")["settings"]
    plain = {"mean": [0, 0, 0], "std": [1, 1, 1], "interpolation": "bilinear"}
    assert {"input_size": [size, size], "crop_pct": crop_pct, **plain}.items() <= found["preprocessing"].items()
    assert found["options"]["batch_size"] == batch_size
    options += ["--resize", "never", "-o", f"{tmp_path / 'uncropped'}"]
    assert remtta_here("eval", root, *tiny, "--checkpoint", checkpoint, *options) == 0
    assert json_of(tmp_path / "uncropped" / "results.json")["settings"]["preprocessing"]["crop_pct"] == 1


def test_the_table_is_printed_before_any_picture_can_fail(
    tiny: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    full = OutputError("plots/reliability.png cannot be written: No space left on device")
    monkeypatch.setattr(plots, "draw_plots", raising(full))
    root = write_tree(tmp_path / "c", ["fog"], each=1)
    assert remtta_here("eval", root, "--methods", "source", *tiny, "--output", tmp_path / "run") == 1
    captured = capfd.readouterr()
    assert captured.out.splitlines()[0].split() == ["error", "in", "%", "source"]
    assert captured.err.splitlines()[-1] == "Error: plots/reliability.png cannot be written: No space left on device"


def test_the_command_starts_from_a_delta_on_the_model_it_was_made_on(
    tiny: list[str], checkpoint: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    root, delta = write_tree(tmp_path / "c", ["fog"], each=1), tmp_path / "a" / "deltas" / "rem_seed0.safetensors"
    evaluate = ["eval", str(root), "--methods", "rem", "--no-plots", "-b", "4"]
    assert remtta_here(*evaluate, *tiny, "--output", tmp_path / "a") == 0
    more: list[str | Path] = ["--delta", delta, "--reset-every", "4", "--output", tmp_path / "b"]
    assert "name them with --checkpoint" in refusal_of(capfd, *evaluate, *more)  # opens no file that a header names
    assert remtta_here(*evaluate, *more, "--checkpoint", checkpoint) == 0, capfd.readouterr().err
    settings = json_of(tmp_path / "b" / "results.json")["settings"]
    assert (settings["start_delta"]["updates"], settings["options"]["reset_every"]) == (2, 4)
    assert [row["update"] for row in rows_of(tmp_path / "b")] == [2] * 4 + [0] * 3
    assert f"all methods, source included, start from {delta}" in (tmp_path / "b" / "table.md").read_text()


def test_one_table_takes_a_method_with_several_settings(
    tiny: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run, root = tmp_path / "run", write_tree(tmp_path / "tree", ["fog"], severities=(), each=1)
    evaluate = ["eval", str(root), *tiny, "-b", "2", "--no-plots"]
    evaluate += [f"--set={value}" for value in ("random.masking=random", "high.lr=0.05", "rem.lr=0.02")]
    assert remtta_here(*evaluate, "-o", run, "--methods", "rem,rem+guard,random=rem,high=rem+guard") == 0
    methods = json_of(run / "results.json")["methods"]
    assert list(methods) == ["rem", "rem+guard", "random=rem", "high=rem+guard"]
    configs = [method["config"] for method in methods.values()]
    assert [config["masking"] for config in configs] == ["auto", "auto", "random", "auto"]
    assert [config["lr"] for config in configs] == [0.02, 0.02, 0.02, 0.05]
    assert (run / "deltas" / "random=rem_seed0.safetensors").is_file()
    for names, told in [
        ("a=rem,a=tent", 'two methods are labelled "a"'),
        ("rem,rem", "rem is named twice"),
        ("a.b=rem", "cannot label"),
        ("tent=rem", "cannot label"),
    ]:
        assert told in refusal_of(capfd, *evaluate, "-o", tmp_path / "no", "--methods", names)


def test_a_class_map_gives_the_true_classes(tiny: list[str], tmp_path: Path) -> None:
    root = write_tree(tmp_path / "c", ["fog"], each=1)
    (tmp_path / "map.txt").write_text("".join(f"{name} {6 - number}\n" for number, name in enumerate(CLASSES)))
    options: list[str | Path] = ["--no-plots", "-q", "--methods", "source", "--class-map", tmp_path / "map.txt"]
    assert remtta_here("eval", root, *tiny, *options, "--output", tmp_path / "run") == 0
    true = {Path(row["source"]).parent.name: row["label_true"] for row in rows_of(tmp_path / "run")}
    assert true == {name: 6 - number for number, name in enumerate(CLASSES)}
