"""Options in the environment."""

import os
from pathlib import Path

import pytest

from remtta.cli import app, share_cores
from tests.command import refusal_of
from tests.test_options_page import COMMANDS


def test_an_option_that_is_not_given_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"BATCH_SIZE": "20", "GUARD": "off", "LR": "1e-3", "NULL": "true", "SET": "a=1 b=2", "MEAN": ".1 .2 .3"}
    for name, value in {**given, "STD": "0.5", "LIMIT": "", "MASK_RATIOS": "0,0.1", "LAMBDA": "2"}.items():
        monkeypatch.setenv(f"REMTTA_{name}", value)
    values = COMMANDS["adapt"].make_context("adapt", ["x", "--batch-size", "8"]).params
    assert (values["batch_size"], values["action"], values["lr"], values["null"]) == (8, "off", 0.001, True)
    assert (values["pairs"], values["mean"], values["limit"]) == (["a=1", "b=2"], (0.1, 0.2, 0.3), None)
    assert values["std"] == (0.5, 0.5, 0.5)
    assert (values["mask_ratios"], values["ranking_weight"]) == ("0,0.1", 2)


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("LR", "abc", "REMTTA_LR: Invalid value for '--lr': must be a number"),
        ("RESUME", "3", "REMTTA_RESUME: Invalid value for '--resume': must be true or false"),
        ("MEAN", "1 2", "REMTTA_MEAN: Invalid value for '--mean': 3 values are required, but 2 given"),
        ("GUARD", "on", "REMTTA_GUARD: Invalid value for '--guard': 'on' is not one of"),
    ],
)
def test_what_is_wrong_there_is_reported_in_one_line(
    name: str, value: str, told: str, frames: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(f"REMTTA_{name}", value)
    assert told in refusal_of(capfd, "adapt", frames)


def test_a_variable_that_is_nearly_an_options_is_named(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("REMTTA_BATCHSIZE", "REMTTA_SERVICE_HOST", "REMTTA_CACHE", "REMTTA_LR"):
        monkeypatch.setenv(name, "20")
    with pytest.raises(SystemExit):
        app(["methods", "rem"])
    told = "REMTTA_BATCHSIZE is ignored: no option has this name; did you mean REMTTA_BATCH_SIZE?\n"
    assert capfd.readouterr().err == told


def test_threads_wait_for_each_other_briefly_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    for given, spins in (({}, "5000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)):
        monkeypatch.setattr(os, "environ", dict(given))
        share_cores()
        assert os.environ.get("GOMP_SPINCOUNT") == spins
        assert "OMP_NUM_THREADS" not in os.environ


def test_a_container_has_threads_for_its_share_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("remtta.cli.usable_cores", lambda: 16)
    monkeypatch.setattr("remtta.cli.num_cores", lambda: 2)
    for given, threads in (({}, "2"), ({"OMP_NUM_THREADS": "4"}, "4")):
        monkeypatch.setattr(os, "environ", dict(given))
        share_cores()
        assert os.environ["OMP_NUM_THREADS"] == threads
