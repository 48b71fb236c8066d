"""Published models, also where `remtta.formats` is not installed."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from remtta import apply_delta, extensions, load_delta, load_model
from remtta.deployment import publishing
from remtta.deployment.publishing import ModelPublisher
from remtta.errors import OutputError, UsageError
from remtta.options import GuardOptions
from remtta.options.loaders import find_loaders
from remtta.pipeline.guard import Guard
from remtta.runs.callbacks import BatchReport
from tests.command import refusal_of
from tests.conftest import TINY, same_tensors, tiny_vit
from tests.runs.tiny import adapt_tiny
from tests.test_files import killed_while_writing


def test_without_formats_only_onnx_is_refused(frames: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find_loaders()  # which are kept from now on
    monkeypatch.setattr(extensions, "_exists", lambda target: not target.startswith("remtta.formats"))
    for name in ("live.onnx", "models"):
        with pytest.raises(UsageError, match=f"--publish .*{name} needs remtta.formats, a part"):
            adapt_tiny(frames, tmp_path / "refused", callbacks=[ModelPublisher(tmp_path / name)])
        assert not (tmp_path / "refused").exists()
    path = tmp_path / "delta.safetensors"
    adapt_tiny(frames, tmp_path / "run", callbacks=[ModelPublisher(path, "1")])
    assert same_tensors(load_delta(path).tensors, load_delta(tmp_path / "run").tensors)


def test_no_input_of_the_run_is_replaced(frames: Path, tmp_path: Path, checkpoint: Path) -> None:
    before, link = checkpoint.read_bytes(), tmp_path / "link.safetensors"
    link.symlink_to(checkpoint)
    model = load_model("vit_tiny_patch16_224", checkpoint=checkpoint, num_classes=7, model_kwargs=TINY)
    for path in (checkpoint, link):
        with pytest.raises(UsageError, match=f"--publish {path} would replace its own input {checkpoint}; choose"):
            adapt_tiny(frames, tmp_path / "run", model=model, callbacks=[ModelPublisher(path)])
    adapt_tiny(frames, tmp_path / "start", callbacks=[ModelPublisher(tmp_path / "delta.safetensors")])
    start = load_delta(tmp_path / "delta.safetensors")
    with pytest.raises(UsageError, match=r"--publish .*delta\.safetensors would replace its own input"):
        publisher = ModelPublisher(tmp_path / "delta.safetensors")
        adapt_tiny(frames, tmp_path / "run", delta=start, callbacks=[publisher])
    assert checkpoint.read_bytes() == before and not (tmp_path / "run").exists()


def test_paths_that_cannot_be_published_to_are_refused_before_torch_is_loaded(
    frames: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "folder.onnx").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "link.safetensors").symlink_to(tmp_path / "gone" / "live.safetensors")
    (tmp_path / "frames_too").symlink_to(frames)
    run = tmp_path / "run"
    for path, text in {
        tmp_path / "link.safetensors": "gone: no such folder; make it first",
        frames: "is the folder of the frames; choose another folder",
        tmp_path / "frames_too": "is the folder of the frames; choose another folder",
        tmp_path / "missing" / "live.onnx": "missing: no such folder; make it first",
        tmp_path / "folder.onnx": "is a folder; name a file",
        tmp_path / "file": "file is a file, so it cannot be a folder to publish in",
        tmp_path / "file" / "models": "file is a file, so",
        run / "delta.safetensors": "is a file of the run; choose another name",
        run / "state.safetensors": "is a file of the run; choose another name",
    }.items():
        assert text in refusal_of(capfd, "adapt", frames, "--model", "none_such", "-o", run, "--publish", path)
    assert not run.exists()


def test_nothing_is_published_beside_the_weights_of_a_local_folder(frames: Path, tmp_path: Path) -> None:
    folder = tmp_path / "local"
    folder.mkdir()
    torch.save(tiny_vit().state_dict(), folder / "pytorch_model.bin")
    config = {"architecture": "vit_tiny_patch16_224", "num_classes": 7, "model_args": {**TINY, "num_classes": 7}}
    (folder / "config.json").write_text(json.dumps({**config, "pretrained_cfg": {"input_size": [3, 32, 32]}}))
    model = load_model(f"local-dir:{folder}")
    with pytest.raises(UsageError, match=rf"is in the folder of the model, {folder}; choose another folder"):
        adapt_tiny(frames, tmp_path / "run", model=model, callbacks=[ModelPublisher(folder / "model.safetensors")])
    assert not (tmp_path / "run").exists()


def test_versions_are_published_through_a_link_to_a_folder_that_does_not_exist_yet(
    frames: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ModelPublisher, "_write", lambda self, path: path.write_text("model"))
    (tmp_path / "link").symlink_to(tmp_path / "models")
    adapt_tiny(frames, tmp_path / "run", callbacks=[ModelPublisher(tmp_path / "link", "100")])
    assert (tmp_path / "models" / "1" / "model.onnx").read_text() == "model"


def test_the_runs_own_folder_need_not_exist(frames: Path, tmp_path: Path) -> None:
    path = tmp_path / "run" / "live.safetensors"
    adapt_tiny(frames, tmp_path / "run", callbacks=[ModelPublisher(path)])
    model = tiny_vit()
    apply_delta(model, load_delta(tmp_path / "run"))
    assert same_tensors(load_file(path), model.state_dict())


def test_what_a_killed_run_was_publishing_is_removed(frames: Path, tmp_path: Path) -> None:
    (tmp_path / "to").mkdir()
    (tmp_path / "link.safetensors").symlink_to(tmp_path / "to" / "live.safetensors")
    killed_while_writing(tmp_path / "to" / "live.safetensors", tmp_path / "to" / "other.safetensors")
    adapt_tiny(frames, tmp_path / "run", callbacks=[ModelPublisher(tmp_path / "link.safetensors")])
    live, left = sorted((path.name for path in (tmp_path / "to").iterdir()), reverse=True)
    assert live == "live.safetensors" and left.startswith(".other.safetensors.")


class Recorded(ModelPublisher):
    """Notes after each batch how many updates are in the delta that is published; None without one."""

    def __init__(self, path: Path, every: str) -> None:
        super().__init__(path, every)
        self.updates: list[int | None] = []

    def on_batch(self, report: BatchReport) -> None:
        super().on_batch(report)
        self.updates.append(load_delta(self._path).updates if self._path.exists() else None)


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes publications fail by their number, from 0."""

    def fail(*numbers: int) -> None:
        write, calls = ModelPublisher._write, iter(range(100))

        def write_or_fail(self: ModelPublisher, path: Path) -> None:
            if next(calls) in numbers:
                raise OutputError("the disk is full")
            write(self, path)

        monkeypatch.setattr(ModelPublisher, "_write", write_or_fail)

    return fail


@pytest.mark.parametrize(("retry_s", "updates"), [(0.0, [None, 2, 2, 4]), (60.0, [None, None, None, None])])
def test_a_publication_that_failed_is_made_later_and_told_once(
    retry_s: float,
    updates: list[int | None],
    frames: Path,
    tmp_path: Path,
    failing: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(publishing, "_RETRY_S", retry_s)
    failing(0, 2)
    publisher = Recorded(tmp_path / "delta.safetensors", "1")
    with caplog.at_level(logging.INFO):
        adapt_tiny(frames, tmp_path / "run", options={"guard": None}, callbacks=[publisher])
    assert publisher.updates == updates
    assert load_delta(tmp_path / "delta.safetensors").updates == 4  # at the end in any case
    told = [message for message in caplog.messages if "published" in message]
    assert told[:2] == [
        "the model was not published: the disk is full",
        f"the model is published again: {publisher._path}",
    ]
    assert len(told) == (4 if retry_s == 0 else 2)


def test_an_older_version_makes_room_for_the_one_after_an_alarm(
    frames: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publishing, "_RETRY_S", 0.0)
    harm, models = iter([False, False, True]), tmp_path / "models"
    monkeypatch.setattr(Guard, "compare", lambda self, *_: next(harm, False) and self.alarm("a test"))

    def write_if_there_is_room(self: ModelPublisher, path: Path) -> None:
        if len(list(models.glob("*/model.onnx"))) == 2:
            raise OutputError("the disk is full")
        path.write_text(f"{self._run.summary.num_alarms} alarms")

    monkeypatch.setattr(ModelPublisher, "_write", write_if_there_is_room)
    adapt_tiny(frames, tmp_path / "run", options={"batch_size": 2}, callbacks=[ModelPublisher(models, "1")])
    versions = {path.parent.name: path.read_text() for path in models.glob("*/model.onnx")}
    assert versions == {"2": "0 alarms", "3": "1 alarms"}


@pytest.mark.parametrize("latency", [False, True])
def test_after_an_alarm_what_did_harm_is_replaced_even_if_that_fails_at_first(
    latency: bool,
    frames: Path,
    tmp_path: Path,
    failing: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(publishing, "_RETRY_S", 0.0)
    harm = iter([False, False, True, False])
    monkeypatch.setattr(Guard, "compare", lambda self, *_: next(harm) and self.alarm("a test"))
    failing(1 if latency else 2)
    publisher = Recorded(tmp_path / "delta.safetensors", "1")
    options: Any = {"batch_size": 2, "guard": GuardOptions("rollback", retries=0), "latency": latency}
    adapt_tiny(frames, tmp_path / "run", options=options, callbacks=[publisher])
    # With --latency, reports come before updates, so after the third batch the weights are not restored yet.
    assert publisher.updates == ([None, 1, 1, 1, 0, 0] if latency else [1, 2, 2, 0, 0, 0])
    assert not any(tensor.any() for name, tensor in load_delta(publisher._path).tensors.items() if name != "head.bias")
    assert [message for message in caplog.messages if "published" in message] == [
        "the model was not published: the disk is full; what was published before the guard's alarm is still there"
    ]
