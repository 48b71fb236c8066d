"""`remtta adapt LIST --streams`: a site of streams as a command, killed and gone on with."""

import json
import os
import signal
from pathlib import Path

import pytest

from tests.command import Started, refusal_of, remtta_here
from tests.conftest import draw_folder, happens
from tests.fork_server import forking_workers, workers_of
from tests.records import assert_same_results, json_of, lines_of, num_rows


@pytest.fixture
def site(tmp_path: Path, tiny: list[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A command on two streams of different lengths; its folder is `site`."""
    monkeypatch.chdir(tmp_path)
    draw_folder(tmp_path / "long", range(24))
    draw_folder(tmp_path / "short", range(100, 106))
    Path("cams.txt").write_text("# two\nlong=long\nshort=short\n")
    return ["adapt", "cams.txt", "--streams", *tiny, "--batch-size", "2"]


def alone(site: list[str]) -> list[str]:
    """The command on a single stream, which is to follow."""
    return [part for part in site if part not in ("cams.txt", "--streams")]


def assert_as_alone(site: list[str], name: str, source: str, *more: str) -> None:
    assert remtta_here(*alone(site), source, *more, "-o", f"{name}-alone", "-q") == 0
    assert_same_results(Path("site", name), Path(f"{name}-alone"))


def test_after_a_kill_every_stream_continues_as_if_nothing_had_happened(
    site: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    command = [*site, "--save-every", "3", "-o", "site"]
    with Started(*command) as process:
        begun = happens(lambda: num_rows(Path("site/long")) >= 6, 120)
        process.kill()
    assert begun
    assert json_of(Path("site/site.json"))["exit_reason"] == "running"
    assert remtta_here("inspect", "site") == 0
    assert "was killed; --resume continues it; 2 streams" in capfd.readouterr().out
    assert remtta_here(*command, "--resume") == 0
    told = capfd.readouterr()
    Path("short").rename("elsewhere")
    before = Path("site/short/predictions.jsonl").read_bytes()
    assert "short: no such file or folder" in refusal_of(capfd, *command, "--resume", "-q", code=1)
    ends = {name: run["exit_reason"] for name, run in json_of(Path("site/site.json"))["streams"].items()}
    assert ends == {"long": "completed", "short": "error: short: no such file or folder"}
    assert Path("site/short/predictions.jsonl").read_bytes() == before
    Path("elsewhere").rename("short")
    assert remtta_here(*command, "--resume", "-q") == 0
    assert told.out == ""
    assert "long   24 frames, 24 predicted, 0 skipped, 12 updates" in told.err
    for name in ("long", "short"):
        assert_as_alone(site, name, name)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")
def test_workers_that_are_killed_and_stopped_continue_as_if_nothing_had_happened(site: list[str]) -> None:
    draw_folder(Path("more"), range(36))
    Path("cams.txt").write_text("long=more\nshort=short\n")
    command = [*site, "--save-every", "3", "--threads", "1", "-o", "site"]

    def grows_beyond(lines: int) -> bool:
        return happens(lambda: num_rows(Path("site/long")) > lines, 300)

    more = ("--jobs", "2", "--health", "health.json")
    with Started(*command, *more, before=forking_workers()) as process:
        assert grows_beyond(2)
        killed = workers_of(process.pid)
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        assert grows_beyond(num_rows(Path("site/long")))
        process.send_signal(signal.SIGTERM)
        _, told = process.communicate(timeout=120)
    assert killed and process.returncode == 128 + signal.SIGTERM
    assert b"long: a worker process died; its work starts again" in told
    assert json_of(Path("site/site.json"))["exit_reason"] == json_of(Path("health.json"))["state"] == "SIGTERM"
    assert not Path("site/.workers").exists()
    assert remtta_here("inspect", "site") == 0
    assert remtta_here(*command, "--resume", "-q") == 0
    for name, source in (("long", "more"), ("short", "short")):
        assert_as_alone(site, name, source, "--threads", "1")


def test_a_stream_that_fails_is_exit_code_1_and_the_others_end_well(
    site: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    Path("cams.txt").write_text("short=short\ngone=http://127.0.0.1:9/live.mjpg\n")
    assert remtta_here(*site, "--reconnect-for", "0", "--log-format", "json", "-o", "site") == 1
    last = json.loads(capfd.readouterr().err.splitlines()[-1])
    assert last["exit_reason"] == "error: 1 of 2 streams failed"
    assert last["streams"]["short"]["exit_reason"] == "completed"
    assert last["streams"]["gone"]["exit_reason"].startswith("error: http://127.0.0.1:9/live.mjpg cannot be opened")
    assert len(lines_of(Path("site/short/predictions.jsonl"))) == 6 and not Path("site/gone").exists()


@pytest.mark.parametrize(
    ("content", "more", "problem"),
    [
        ("a=short\nb=nowhere", [], "b: nowhere: no such file or folder"),
        ("a=short", ["--predictions", "-"], "--predictions - is for one stream"),
        ("a=short\nb=nowhere", ["--jobs", "2"], "b: nowhere: no such file or folder"),
        ("a=short\nb=long", ["--method", "cotta", "--jobs", "2", "-o", "site"], "cotta changes every weight"),
        (
            "a=short",
            ["--annotate", "x.mp4"],
            "--annotate is for one stream; leave it out with --streams",
        ),
        ("a=short", ["--mqtt", "mqtt://127.0.0.1:1/t"], "--mqtt is for one stream; leave it out with --streams"),
        ("a=short", ["--health", "site/site.json", "-o", "site"], "--health: site/site.json is a file of the run"),
    ],
)
def test_what_cannot_be_run_is_refused_in_a_line(
    content: str, more: list[str], problem: str, site: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    Path("cams.txt").write_text(content)
    line = refusal_of(capfd, *site, *more)
    assert problem in line and not Path("site").exists()


def test_folders_of_others_and_of_streams_are_kept_whatever_the_options(
    site: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    line = refusal_of(capfd, *alone(site), "short", "-o", "long", "--resume")
    assert "long is not empty (0.png, ...) and holds no earlier run" in line
    assert remtta_here(*site, "-o", "site", "-q") == 0
    assert "site holds the runs of many streams" in refusal_of(capfd, *alone(site), "short", "-o", "site", "--resume")
    Path("cams.txt").write_text("other=short")
    assert "site holds the runs of many streams already" in refusal_of(capfd, *site, "-o", "site")
    assert set(json_of(Path("site/site.json"))["streams"]) == {"long", "short"}
