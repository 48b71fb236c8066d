"""Predictions reach an MQTT broker despite interruptions."""

import contextlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from remtta.deployment import mqtt as publishing
from remtta.deployment.mqtt import Publisher, Topic, parse_topic
from remtta.errors import UsageError
from remtta.runs.callbacks import BatchReport, Callback
from remtta.runs.summary import RunSummary
from tests.command import refusal_of, remtta_here
from tests.conftest import free_port, happens
from tests.records import parsed, rows_of
from tests.runs.tiny import adapt_tiny

ROOT = Path(__file__).parent.parent.parent


@contextlib.contextmanager
def broker(port: int, file: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Yield an amqtt process, which is killed at the end."""
    command = [sys.executable, "-m", "tests.deployment.mqtt_broker", str(port), str(file)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=ROOT)
    try:
        assert process.stdout and process.stdout.readline() == b"up\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def received(file: Path) -> list[int]:
    """Return indices of the rows received by the broker, in order, under the topic of the tests."""
    if not file.exists():
        return []
    messages = [line.partition(" ") for line in file.read_text().splitlines()]
    assert {topic for topic, _, _ in messages} <= {"site/cam1"}
    return [json.loads(text)["index"] for _, _, text in messages]


def test_a_broker_that_is_killed_delays_no_prediction_and_misses_none(
    frames: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publishing, "RETRY_S", (0.1, 0.2))
    monkeypatch.setattr(publishing, "PATIENCE_S", 60.0)  # longer than the run takes on a busy machine
    port, file, run = free_port(), tmp_path / "got.txt", tmp_path / "run"
    topic = Topic("127.0.0.1", port, "site/cam1")

    class Broker(Callback):
        """A broker that is killed after the first batch, and comes back when the run is through."""

        def on_batch(self, report: BatchReport) -> None:
            if first.poll() is None:
                assert happens(lambda: received(file) == [0, 1, 2], 20.0)
                first.kill()
                first.wait()

        def on_end(self, summary: RunSummary) -> None:
            assert received(file) == [0, 1, 2] and len(rows_of(run)) == 12  # the run waited for no broker
            brokers.enter_context(broker(port, file))

    with contextlib.ExitStack() as brokers:
        first = brokers.enter_context(broker(port, file))
        adapt_tiny(frames, run, callbacks=[Publisher(topic), Broker()])
        assert set(received(file)) == set(range(12))
    noted = json.loads((run / "mqtt.json").read_text())
    assert noted == {"to": topic.shown, "sent_bytes": (run / "predictions.jsonl").stat().st_size}


def test_what_no_broker_took_is_sent_when_the_run_continues(
    frames: Path, tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(publishing, "PATIENCE_S", 0.1)
    port, file, run = free_port(), tmp_path / "got.txt", tmp_path / "run"
    command = ["adapt", str(frames), *tiny, "-o", str(run), "--mqtt", f"mqtt://127.0.0.1:{port}/site/cam1"]
    assert remtta_here(*command) == 0
    told = capfd.readouterr().err
    assert len(re.findall(r"/site/cam1 cannot be reached \(.*refused\); predictions wait in the file", told)) == 1
    assert "has not confirmed all predictions; --resume sends the rest" in told
    monkeypatch.setattr(publishing, "PATIENCE_S", 20.0)
    with broker(port, file):
        assert remtta_here(*command, "--resume") == 0
        assert received(file) == list(range(12)) == [row["index"] for row in rows_of(run)]
        assert remtta_here(*command, "--resume") == 0
        assert len(received(file)) == 12
    assert parsed(file.read_text().replace("site/cam1 ", "")) == rows_of(run)


def test_addresses_are_taken_apart_and_shown_without_a_password() -> None:
    topic = parse_topic("mqtts://anna:p%40ss@broker/site/cam%201")
    assert topic == Topic("broker", 8883, "site/cam 1", True, "anna", "p@ss")
    assert topic.shown == "mqtts://broker:8883/site/cam 1"


BAD = ("broker/topic", "mqtt://b", "mqtt://b/", "mqtt://b/a/#", "http://b/t", "mqtt://b:x/t", "mqtt://b..c/t")


@pytest.mark.parametrize("text", BAD)
def test_other_addresses_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--mqtt takes mqtt://HOST:PORT/TOPIC"):
        parse_topic(text)


def test_what_cannot_be_had_is_reported_in_one_line(
    frames: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mqtt = ["--output", str(tmp_path / "run"), "--mqtt", "mqtt://127.0.0.1:1/t"]
    monkeypatch.setitem(sys.modules, "paho.mqtt.client", None)
    assert 'pip install "paho-mqtt>=' in refusal_of(capfd, "adapt", frames, *mqtt, "--model", "remtta-demo")
