"""The rows, records and files of an evaluation, and the state of its model afterwards."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from remtta.baselines.eata import RDumbConfig
from remtta.deltas.delta import Delta, load_delta
from remtta.errors import DeltaError, RemttaError, StreamError, UsageError
from remtta.lab.evaluation.domains import Dataset, Domain
from remtta.methods import rem as rem_module
from remtta.methods.losses import rem_loss
from remtta.methods.settings.base import MethodConfig
from remtta.methods.settings.rem_config import REMConfig
from remtta.methods.table import method_config
from remtta.models.tensor_files import state_sha256
from remtta.options import GuardOptions
from remtta.pipeline.pipeline import Pipeline
from remtta.pipeline.prediction import Prediction
from tests.conftest import tiny_vit
from tests.lab.evaluation.trees import evaluate_tiny, open_tree, write_tree
from tests.records import parsed, rows_of

SOON_RETIRED = GuardOptions(
    window=24, check_every=1, class_history=1, min_frames=12, most_drift=0.1, doubt=0.01, alarm=0.02, retries=0
)


@pytest.fixture
def tree(tmp_path: Path) -> Dataset:
    """Two domains of 28 images, which batches of 8 do not divide."""
    return open_tree(write_tree(tmp_path / "c", ["snow", "fog"], severities=(), each=4))


def run_guarded(tree: Dataset, folder: Path, **changes: Any) -> Any:
    """The record of a run that soon does harm."""
    methods = {"rem+guard": REMConfig(lr=0.05)}
    results = evaluate_tiny(tree, folder, methods, batch_size=8, guard=SOON_RETIRED, **changes)
    return results["methods"]["rem+guard"]["seeds"]["0"]


def test_a_retired_guard_has_the_source_answer_in_tests_without_learning_too(tree: Dataset, tmp_path: Path) -> None:
    run = run_guarded(tree, tmp_path / "run", unseen=("fog",), revisit=True)
    rows = rows_of(tmp_path / "run")
    tested = [row for row in rows if row["phase"] != "adapt"]
    assert len(tested) == 56
    assert all((row["answered_by"], row["update"]) == ("source", 0) for row in tested)
    assert run["guard"]["answered_by_source"] == sum("answered_by" in row for row in rows)


def test_a_method_guarded_by_default_runs_without_guard_if_updates_do_not_last(tree: Dataset, tmp_path: Path) -> None:
    config = method_config("remtta", {"episodic": True}, batch_size=8)
    results = evaluate_tiny(tree, tmp_path / "remtta", {"remtta": config})
    assert results["methods"]["remtta"]["seeds"]["0"]["guard"] is None
    with pytest.raises(UsageError, match=r"rem\+guard: rem changes no weights that a guard could restore; leave"):
        evaluate_tiny(tree, tmp_path / "run", {"rem+guard": REMConfig(episodic=True)})


@pytest.mark.parametrize("always", [2, 3])
def test_a_first_batch_that_is_right_in_the_other_order_of_classes_is_pointed_out(
    always: int, tree: Dataset, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_vit()
    model.head.bias.data[always] = 1000.0
    domains = [replace(domain, labels=np.full_like(domain.labels, 2)) for domain in tree.domains]
    swapped = replace(tree, domains=domains, other_order=[0, 1, 3, 2, 4, 5, 6])
    evaluate_tiny(swapped, tmp_path / "run", model=model, batch_size=8)
    told = [message for message in caplog.messages if "of the first 8 images, 0 are right" in message]
    assert len(told) == (always == 3)


def test_the_guards_decisions_are_lines_that_resuming_leaves_the_same(
    tree: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_guarded(tree, tmp_path / "whole", seeds=(0, 1))
    whole = (tmp_path / "whole" / "events.jsonl").read_bytes()
    events = parsed(whole)
    assert [(event["event"], event["seed"]) for event in events] == [("retired", 0), ("retired", 1)]
    for event in events:  # after the batch whose update raised the last alarm, the source answers
        assert (event["method"], event["phase"], event["visit"]) == ("rem+guard", "adapt", 0)
        own = [row for row in rows_of(tmp_path / "whole") if row["seed"] == event["seed"]]
        assert [row["index"] for row in own if "answered_by" in row] == list(range(event["index"] + 8, 56))
    predict, calls = Pipeline.predict, 0

    def dying(pipeline: Pipeline, *args: Any, **more: Any) -> Prediction:
        nonlocal calls
        calls += 1
        prediction = predict(pipeline, *args, **more)
        if calls == 10:  # in the second run, of seven batches each
            with open(tmp_path / "parts" / "events.jsonl", "ab") as file:
                file.write(b'{"torn')
            raise KeyboardInterrupt
        return prediction

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Pipeline, "predict", dying)
        run_guarded(tree, tmp_path / "parts", seeds=(0, 1), save_every_s=0.0)
    run_guarded(tree, tmp_path / "parts", seeds=(0, 1), resume=True)
    assert (tmp_path / "parts" / "events.jsonl").read_bytes() == whole
    assert rows_of(tmp_path / "parts") == rows_of(tmp_path / "whole")


def test_replacing_an_evaluation_removes_what_it_left_and_nothing_else(tree: Dataset, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run_guarded(tree, folder)
    (folder / "plots").mkdir()
    for name in ("plots/reliability.png", "plots/mine.txt", "mine.tex", "table.tex"):
        (folder / name).touch()
    with pytest.raises(StreamError, match="not an image"):
        Path(tree.domains[1].sources[3]).write_bytes(b"no image")
        evaluate_tiny(tree, folder, overwrite=True)
    left = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert left == {"results.json", "predictions.jsonl", ".progress.safetensors", "plots/mine.txt", "mine.tex"}
    assert not (folder / "deltas").exists()


def test_a_domain_of_which_no_image_can_be_read_is_reported(tree: Dataset, tmp_path: Path) -> None:
    [fog] = [domain for domain in tree.domains if domain.name == "fog"]
    for source in fog.sources:
        Path(source).write_bytes(b"no image")
    for resume in (False, True):
        with pytest.raises(StreamError, match=r"^source, seed 0: fog: no readable image \(28 failed; see predictions"):
            evaluate_tiny(tree, tmp_path / "run", on_error="skip", batch_size=8, scenario="mixed", resume=resume)


def test_an_error_in_a_worker_names_the_method_and_seed(tree: Dataset, tmp_path: Path) -> None:
    methods = {"source": {}, "high=tent": {"lr": 1e30}}
    with pytest.raises(RemttaError, match=r"^high=tent, seed 0: the model's outputs are not finite numbers"):
        evaluate_tiny(tree, tmp_path / "run", methods, engine="processes", jobs=1)


@pytest.mark.parametrize("by", ["scenario", "config", "rdumb"])
def test_deltas_count_from_the_last_reset_and_results_count_all(by: str, tree: Dataset, tmp_path: Path) -> None:
    method: dict[str, MethodConfig] = {"rem": REMConfig(episodic=by == "config")}
    if by == "rdumb":
        method = {"rdumb": RDumbConfig(entropy_margin=9.0, max_cosine=9.0, reset_every_steps=3)}
    scenario = "episodic" if by == "scenario" else "continual"
    [run] = evaluate_tiny(tree, tmp_path / "run", method, batch_size=8, scenario=scenario)["methods"].values()
    delta = load_delta(tmp_path / "run" / "deltas" / f"{next(iter(method))}_seed0.safetensors")
    rows = rows_of(tmp_path / "run")
    # 28 images are batches of 8, 8, 8 and 4, twice; RDumb forgets the third and the sixth of the eight.
    counts = {"scenario": (28, 4, 56, 8), "config": (4, 1, 56, 8), "rdumb": (12, 2, 40, 8)}
    assert (delta.frames, delta.updates) == counts[by][:2]
    assert (run["seeds"]["0"]["adapted_images"], run["seeds"]["0"]["updates"]) == counts[by][2:]
    assert sum(row["adapted"] for row in rows) == counts[by][2]
    assert by != "config" or not any(row["update"] for row in rows)


def test_a_reset_comes_after_so_many_images_and_not_in_tests(tree: Dataset, tmp_path: Path) -> None:
    evaluate_tiny(tree, tmp_path / "run", {"rem": REMConfig()}, batch_size=8, reset_every=12, revisit=True)
    rows = rows_of(tmp_path / "run")
    # The batches of a domain are of 8, 8, 8 and 4: a reset before every other one; then tests, before which one is due.
    assert [row["update"] for row in rows if row["index"] % 28 in (0, 8, 16, 24)] == [0, 1] * 4 + [2] * 8
    delta = load_delta(tmp_path / "run" / "deltas" / "rem_seed0.safetensors")
    assert (delta.frames, delta.updates) == (12, 2)


def test_an_evaluation_starts_from_a_delta_as_adapt_does(tree: Dataset, tmp_path: Path) -> None:
    [snow, fog] = tree.domains if tree.domains[0].name == "snow" else reversed(tree.domains)
    methods = {"source": None, "rem": REMConfig(lr=0.01)}

    def run(name: str, *domains: Domain, **more: Any) -> dict[str, Any]:
        dataset = replace(tree, domains=domains)
        return evaluate_tiny(dataset, tmp_path / name, methods, batch_size=8, order="stored", **more)

    whole = run("whole", snow, fog)
    run("first", snow)
    delta = load_delta(tmp_path / "first" / "deltas" / "rem_seed0.safetensors")
    results = run("second", fog, delta=delta)

    def answers(folder: str, method: str) -> list[tuple[str, int, int]]:
        rows = [row for row in rows_of(tmp_path / folder) if (row["method"], row["domain"]) == (method, "fog")]
        return [(row["source"], row["class"], row["update"]) for row in rows]

    # Adam begins anew, so only the first batch is the same.
    assert answers("second", "rem")[:8] == answers("whole", "rem")[:8]
    assert answers("second", "source") != answers("whole", "source")
    saved = load_delta(tmp_path / "second" / "deltas" / "rem_seed0.safetensors")
    assert (saved.frames, saved.updates) == (56, 8)
    assert results["methods"]["rem"]["seeds"]["0"]["updates"] == 4
    assert results["settings"]["start_delta"]["file_sha256"] == delta.file_sha256
    assert "start_delta" not in whole["settings"]


def test_a_delta_that_would_change_nothing_or_is_of_another_model_is_refused(tree: Dataset, tmp_path: Path) -> None:
    delta = Delta({}, "vit", state_sha256(tiny_vit()), "rem")
    with pytest.raises(UsageError, match="starts every domain from the source weights; leave --delta out"):
        evaluate_tiny(tree, tmp_path / "a", scenario="episodic", delta=delta)
    with pytest.raises(DeltaError, match="made on other weights"):
        evaluate_tiny(tree, tmp_path / "b", model=tiny_vit(seed=1), delta=delta)
    assert not (tmp_path / "a").exists() and not (tmp_path / "b").exists()


def test_a_model_is_back_at_its_source_weights_after_a_failure(
    tree: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, calls = tiny_vit(), 0
    before = state_sha256(model)

    def failing(*args: Any) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise RuntimeError("out of memory")
        return rem_loss(*args)

    monkeypatch.setattr(rem_module, "rem_loss", failing)
    with pytest.raises(RuntimeError):
        evaluate_tiny(tree, tmp_path / "run", {"rem": REMConfig()}, model=model, batch_size=8)
    assert calls == 3 and state_sha256(model) == before
