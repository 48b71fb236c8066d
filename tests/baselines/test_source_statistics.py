"""Learning from clean source images: what is computed, when it is computed again, and what is refused."""

import json
import logging
import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from remtta.baselines.source_statistics import SourceStatistics
from remtta.errors import CheckpointError, OutputError, StreamError, UsageError
from remtta.files import cache_folder
from remtta.lab.evaluation.datasets import open_dataset
from remtta.lab.evaluation.evaluating import evaluate
from remtta.lab.evaluation.options import EvalOptions
from remtta.methods.base import Center, LossOutput
from remtta.methods.build import build_method
from remtta.methods.settings.chosen import STREAM_METHODS
from remtta.methods.settings.core import MethodSpec
from remtta.methods.source_data import check_source_data
from remtta.methods.table import METHOD_TABLE
from remtta.methods.tent import Tent, TentConfig
from remtta.models.preprocessing import Preprocessing, preprocessing_of
from remtta.streams.images import load_image
from tests.command import refusal_of, remtta_here
from tests.conftest import NUM_CLASSES, TINY_OPTIONS, draw_folder, draw_image, tiny_vit
from tests.lab.evaluation.trees import write_tree


class Anchored(Tent, SourceStatistics[TentConfig]):
    """Tent that also pulls towards the mean prediction on source images."""

    computed = 0

    def source_statistics(self, batches: Iterable[Tensor]) -> dict[str, Tensor]:
        type(self).computed += 1
        probs = torch.cat([self.forward(images).softmax(-1).detach() for images in batches])
        return {"mean": probs.mean(0)}

    def loss(self, images: Tensor, center: Center) -> LossOutput:
        views, loss, count = super().loss(images, center)
        return LossOutput(views, loss - (self.statistics["mean"] * views[0].log_softmax(-1)).sum(-1).mean(), count)


@pytest.fixture(autouse=True)
def anchored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(
        METHOD_TABLE, "anchored", MethodSpec("tests.baselines.test_source_statistics:Anchored", "for these tests")
    )
    monkeypatch.setenv("REMTTA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(Anchored, "computed", 0)


@pytest.fixture
def clean(tmp_path: Path) -> Path:
    """A folder of five clean images, some in a folder below."""
    folder = draw_folder(tmp_path / "clean", (100, 102, 104))
    draw_folder(folder / "below", (101, 103))
    return folder


def learn(source: Path, model: nn.Module | None = None, name: str = "anchored", **settings: Any) -> dict[str, Any]:
    """What a record says that a method learned from."""
    method = build_method(name, model or tiny_vit(), METHOD_TABLE[name].config(**settings))
    return method.learn_from_source(source, name=name)


def test_statistics_are_those_of_the_preprocessed_images(clean: Path, tmp_path: Path) -> None:
    record = learn(clean)
    model = tiny_vit()
    chosen = preprocessing_of(model)
    images = torch.stack([chosen.transform()(load_image(path)) for path in sorted(clean.rglob("*.png"))])
    with torch.no_grad():
        expected = model(chosen.normalise(images)).softmax(-1).mean(0)
    torch.testing.assert_close(load_file(record["path"])["mean"], expected)
    assert record["images"] == 5
    assert Path(record["path"]).parent == tmp_path / "cache"


def test_statistics_are_computed_once_and_the_log_says_where_they_are_read_from(
    clean: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = learn(clean)
    with caplog.at_level(logging.INFO, logger="remtta"):
        assert learn(clean) == first
    assert Anchored.computed == 1
    assert f"from an earlier run: {first['path']}" in caplog.text
    assert "anchored has statistics of only 5 source images; a few hundred are better" in caplog.text


@pytest.mark.parametrize("changed", ["file", "time", "weights", "activation", "setting", "preprocessing"])
def test_statistics_are_computed_again_when_what_they_depend_on_changes(changed: str, clean: Path) -> None:
    first = learn(clean)
    model: Any = tiny_vit(seed=3 if changed == "weights" else 0)
    if changed == "activation":
        model.blocks[0].mlp.act = torch.nn.ReLU()
    if changed == "preprocessing":
        model.pretrained_cfg = {**model.pretrained_cfg, "mean": (0.4, 0.5, 0.5)}
    if changed == "file":
        draw_image(200).save(clean / "9.png")
    if changed == "time":
        os.utime(clean / "0.png", ns=(1, 1))
    settings = {"adapt_layers": "0-1"} if changed == "setting" else {}
    second = learn(clean, model, **settings)
    assert Anchored.computed == 2 and second["path"] != first["path"]
    same = second["tensors_sha256"] == first["tensors_sha256"]  # which lets a run continue
    assert same == (changed in ("time", "setting"))


@pytest.mark.parametrize(
    ("method", "idle", "mattering"),
    [
        ("foa", {"num_prompts": 1, "population": 4, "micro_batch": 2, "precision": "fp32"}, {"precision": "bf16"}),
        ("petal", {"lr": 1e-3, "restore": 0.1, "posterior_weight": 1.0, "num_augmentations": 2}, {"swag_lr": 1e-3}),
    ],
)
def test_statistics_are_kept_under_settings_they_do_not_depend_on(
    method: str, idle: dict[str, Any], mattering: dict[str, Any], clean: Path
) -> None:
    usual, same, other = (learn(clean, name=method, **settings)["path"] for settings in ({}, idle, mattering))
    assert usual == same != other


@pytest.mark.parametrize("damage", [lambda data: data[:-7], lambda data: data[:-1] + bytes([data[-1] ^ 1])])
def test_a_damaged_cache_is_computed_again_with_a_warning(
    damage: Any, clean: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = learn(clean)
    path = Path(first["path"])
    path.write_bytes(damage(path.read_bytes()))
    assert learn(clean) == first
    assert Anchored.computed == 2
    assert [record.levelname for record in caplog.records if "computed again" in record.message] == ["WARNING"]


def test_a_file_of_statistics_may_be_named_and_must_fit(clean: Path, tmp_path: Path) -> None:
    first = learn(clean)
    named = tmp_path / "kept.safetensors"
    named.write_bytes(Path(first["path"]).read_bytes())
    second = learn(named)
    assert first["source_data"] == str(clean)
    assert second == {**first, "source_data": str(named), "path": str(named)}
    assert Anchored.computed == 1
    with pytest.raises(CheckpointError, match=r"kept.safetensors was made with another model_sha256"):
        learn(named, tiny_vit(seed=3))
    named.write_bytes(named.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="not a readable file of source statistics"):
        learn(named)


def test_images_that_cannot_be_read_are_left_out(clean: Path, caplog: pytest.LogCaptureFixture) -> None:
    (clean / "broken.png").write_text("no image")
    draw_image(0, 1_000_000, 1).save(clean / "line.png")  # resized, it would take gigabytes
    assert learn(clean)["images"] == 5
    assert "skipped the source image" in caplog.text and "broken.png" in caplog.text and "line.png" in caplog.text


def test_folders_without_a_readable_image_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no images in"):
        learn(tmp_path)
    (tmp_path / "broken.png").write_text("no image")
    with pytest.raises(StreamError, match=r"no readable image \(1 failed\)"):
        learn(tmp_path)
    with pytest.raises(UsageError, match=r"is neither a folder of images nor a \.safetensors file"):
        learn(tmp_path / "broken.png")


def test_the_cache_is_where_the_environment_says(clean: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cache_folder() == tmp_path / "cache"
    (tmp_path / "cache").touch()
    with pytest.raises(OutputError, match=r"cache cannot be made: File exists; name a folder .* with REMTTA_CACHE$"):
        learn(clean)
    monkeypatch.delenv("REMTTA_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "remtta"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "remtta"


def test_source_images_are_asked_for_where_they_are_needed_and_only_there(clean: Path) -> None:
    with pytest.raises(UsageError, match=r"^anchored learns from clean .* with --source-data FOLDER$"):
        check_source_data(["tent", "anchored"], None)
    with pytest.raises(UsageError, match="tent, rem do not use source images; leave --source-data out"):
        check_source_data(["tent", "rem"], clean)
    with pytest.raises(UsageError, match="nowhere: no such file or folder"):
        check_source_data(["anchored"], clean / "nowhere")
    check_source_data(["tent"], None)
    check_source_data(["tent", "anchored"], clean)


def evaluation(
    root: Path, output: Path, source: Path | None, preprocessing: Preprocessing | None = None, **changes: Any
) -> Any:
    dataset = open_dataset(root, num_classes=NUM_CLASSES)
    methods = {"source": METHOD_TABLE["source"].config(), "anchored": TentConfig(lr=0.01)}
    options = EvalOptions(batch_size=6, seeds=(0, 1), **changes)
    return evaluate(
        tiny_vit(), dataset, output, methods=methods, options=options, preprocessing=preprocessing, source_data=source
    )


def test_an_evaluation_learns_once_for_all_seeds_and_records_it(clean: Path, tmp_path: Path) -> None:
    tree = write_tree(tmp_path / "c", domains=["fog"], each=1)
    results = evaluation(tree, tmp_path / "out", clean)
    assert Anchored.computed == 1
    record = results["settings"]["source_statistics"]
    assert list(record) == ["anchored"]
    assert (Path(record["anchored"]["path"]).parent, record["anchored"]["images"]) == (tmp_path / "cache", 5)
    with pytest.raises(UsageError, match="holds an evaluation already"):
        evaluation(tree, tmp_path / "out", clean / "below")
    assert Anchored.computed == 1  # refused before any work
    with pytest.raises(UsageError, match="anchored learns from clean images"):
        evaluation(tree, tmp_path / "two", None)


@pytest.mark.parametrize("size", [32, 40])
def test_an_evaluation_treats_source_images_as_its_own(size: int, clean: Path, tmp_path: Path) -> None:
    tree = write_tree(tmp_path / "c", domains=["fog"], each=1, size=size)
    model = tiny_vit()
    draw_image(300, 32, 32).save(clean / "fitting.png")
    chosen = replace(preprocessing_of(model), mean=(0.4, 0.5, 0.6), crop_pct=1.0 if size == 32 else 0.8)
    paths = []
    for name, preprocessing in (("own", None), ("chosen", chosen)):
        results = evaluation(tree, tmp_path / name, clean, preprocessing)
        paths.append(results["settings"]["source_statistics"]["anchored"]["path"])
    assert Anchored.computed == 2  # the cache knows them apart
    # Where the domains need no crop, source images that fit are not cropped either, and others as the model asks.
    crops = [1.0 if path.stem == "fitting" else 0.9 for path in clean.rglob("*.png")] if size == 32 else [0.8] * 6
    images = [
        replace(chosen, crop_pct=crop).transform()(load_image(path))
        for path, crop in zip(clean.rglob("*.png"), crops, strict=True)
    ]
    with torch.no_grad():
        expected = model(chosen.normalise(torch.stack(images))).softmax(-1).mean(0)
    torch.testing.assert_close(load_file(paths[1])["mean"], expected)


def test_the_commands_ask_before_any_work(
    frames: Path,
    clean: Path,
    checkpoint: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(STREAM_METHODS, "anchored", "for these tests")
    model: list[str | Path] = [*TINY_OPTIONS, "--checkpoint", checkpoint]
    run: list[str | Path] = ["adapt", frames, *model, "--method", "anchored", "--output", tmp_path / "run"]
    assert "anchored learns from clean images of the source domain first" in refusal_of(capfd, *run)
    assert not (tmp_path / "run").exists()
    assert remtta_here(*run, "--source-data", clean, "--set", "lr=0.02") == 0
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (record["source_statistics"]["images"], record["method"]["lr"]) == (5, 0.02)


@pytest.mark.parametrize(("wanted", "used"), [(3, 3), (9, 5)])
def test_the_record_counts_the_images_that_were_learned_from(wanted: int, used: int, clean: Path) -> None:
    assert learn(clean, name="eata", fisher_images=wanted)["images"] == used
