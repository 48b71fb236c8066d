"""Publish predictions to an MQTT broker at least once each, from the predictions file."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Self
from urllib.parse import unquote, urlsplit

from remtta.errors import OutputError, UsageError, needed
from remtta.files import write_json
from remtta.options.option import output_option
from remtta.runs.callbacks import BatchReport, Callback, PlannedRun
from remtta.runs.folder import MQTT, PREDICTIONS

if TYPE_CHECKING:
    from paho.mqtt.reasoncodes import ReasonCode

    from remtta.runs.run import Run
    from remtta.runs.summary import RunSummary

PATIENCE_S = 5.0  # for the broker to take the rest at the end
_POLL_S, _SAVE_EVERY_S = 0.05, 1.0
_MAX_IN_FLIGHT = 200  # messages not yet confirmed by the broker
RETRY_S = (1, 30)
_PORTS = {"mqtt": 1883, "mqtts": 8883}

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Topic:
    """Destination of predictions: the broker, the topic's name, and whether to use TLS."""

    host: str
    port: int
    name: str
    secure: bool = False
    user: str | None = None
    password: str | None = None

    @property
    def shown(self) -> str:
        """The address without user and password."""
        return f"mqtt{'s' * self.secure}://{self.host}:{self.port}/{self.name}"


def parse_topic(text: str) -> Topic:
    """Parse `mqtt://[USER:PASSWORD@]HOST[:PORT]/TOPIC`, or `mqtts://` for TLS; raise UsageError if it is malformed, or
    paho-mqtt is missing.
    """
    needed("paho.mqtt.client", "mqtt", "--mqtt")
    try:
        url = urlsplit(text)
        host, port, name = url.hostname, url.port, unquote(url.path.removeprefix("/"))
        (host or "").encode("idna")  # as the connection will
    except ValueError:
        url, host, port, name = urlsplit(""), None, None, ""
    if not host or url.scheme not in _PORTS or not name or set(name) & set("#+\0") or url.query or "#" in text:
        raise UsageError("--mqtt takes mqtt://HOST:PORT/TOPIC, or mqtts://, with a topic without # and +")
    user, password = (None if part is None else unquote(part) for part in (url.username, url.password))
    return Topic(host, port or _PORTS[url.scheme], name, url.scheme == "mqtts", user, password)


@dataclass(frozen=True)
class MqttOptions:
    """The MQTT broker."""

    mqtt: Annotated[
        str | None,
        output_option(
            "Also send predictions to an MQTT broker, each at least once; mqtts:// for TLS.",
            metavar="mqtt://HOST/TOPIC",
            more="reliability.md#mqtt",
        ),
    ] = None


class Publisher(Callback):
    """Publishes the lines of a run's predictions file from a thread, so that the broker delays no prediction.

    The run's folder records how much the broker has confirmed, and a resumed run continues from there.
    """

    options = MqttOptions

    def __init__(self, topic: Topic) -> None:
        from paho.mqtt.client import Client
        from paho.mqtt.enums import CallbackAPIVersion

        self._topic = topic
        self._started, self._closing = threading.Event(), threading.Event()
        self._in_flight: deque[tuple[int, int]] = deque()  # message ids, and where their lines end
        self._confirmed: set[int] = set()
        self._read = self._sent = self._saved = 0  # bytes of the file
        self._warned = False
        self._client = Client(CallbackAPIVersion.VERSION2)
        if topic.user is not None:
            self._client.username_pw_set(topic.user, topic.password)
        if topic.secure:
            self._client.tls_set()
        self._client.reconnect_delay_set(*RETRY_S)
        self._client.on_connect = self._log_connection
        self._client.on_connect_fail = lambda client, data: self._warn(f"cannot be reached ({sys.exception()})")
        self._client.on_disconnect = lambda client, data, flags, reason, more: self._warn(f"is lost ({reason})")
        self._client.on_publish = lambda client, data, message, *more: self._confirmed.add(message)

    @classmethod
    def from_options(cls, options: MqttOptions, run: PlannedRun) -> Self | None:
        return None if options.mqtt is None else cls(parse_topic(options.mqtt))

    def on_start(self, run: Run) -> None:
        """Connect to the broker."""
        self._folder, self._resume = run.summary.output, run.context.options.resume
        self._client.connect_async(self._topic.host, self._topic.port)
        self._client.loop_start()
        self._thread = threading.Thread(target=self._work, name="remtta-mqtt", daemon=True)
        self._thread.start()

    def on_batch(self, report: BatchReport) -> None:
        self._start()

    def _start(self) -> None:
        """Start publishing: the file now belongs to this run."""
        if not self._started.is_set():
            self._read = self._sent = self._saved = self._sent_before() if self._resume else 0
            self._started.set()

    def on_end(self, summary: RunSummary) -> None:
        """Publish the rest, as far as the broker accepts it within a few seconds."""
        if self._resume:  # the rest of an earlier part, if no frame followed
            self._start()
        self._closing.set()
        self._thread.join()
        self._client.on_disconnect = None
        self._client.disconnect()
        self._client.loop_stop()
        if self._started.is_set() and self._num_unsent:
            _log.warning("%s has not confirmed all predictions; --resume sends the rest", self._topic.shown)

    @property
    def _num_unsent(self) -> int:
        """Number of bytes of the file not yet confirmed."""
        path = self._folder / PREDICTIONS
        return (path.stat().st_size if path.exists() else 0) - self._sent

    def _sent_before(self) -> int:
        """Return the number of bytes that an earlier part of the run has published to this topic."""
        try:
            saved = json.loads((self._folder / MQTT).read_bytes())
            with open(self._folder / PREDICTIONS, "rb") as file:
                file.seek(saved["sent_bytes"] - 1)
                return int(saved["sent_bytes"]) if saved["to"] == self._topic.shown and file.read(1) == b"\n" else 0
        except (OSError, ValueError, KeyError, TypeError):  # missing or damaged: publish all of it again
            return 0

    def _work(self) -> None:
        saved_at, deadline = time.monotonic(), math.inf
        while time.monotonic() < deadline:
            if self._started.is_set():
                self._send_new()
                while self._in_flight and self._in_flight[0][0] in self._confirmed:
                    message, self._sent = self._in_flight.popleft()
                    self._confirmed.discard(message)
            if self._closing.is_set():
                if not self._started.is_set() or not self._num_unsent:
                    break
                deadline = min(deadline, time.monotonic() + PATIENCE_S)
            if time.monotonic() - saved_at > _SAVE_EVERY_S:
                self._save()
                saved_at = time.monotonic()
            time.sleep(_POLL_S)
        self._save()

    def _send_new(self) -> None:
        """Publish complete lines, as long as not too many are unconfirmed."""
        path = self._folder / PREDICTIONS
        if not (self._client.is_connected() and path.exists()):
            return
        with open(path, "rb") as file:
            file.seek(self._read)
            while len(self._in_flight) < _MAX_IN_FLIGHT and (line := file.readline()).endswith(b"\n"):
                self._read += len(line)
                self._in_flight.append((self._client.publish(self._topic.name, line.rstrip(), qos=1).mid, self._read))

    def _save(self) -> None:
        if self._sent != self._saved:
            with contextlib.suppress(OutputError):  # the disk may be full for now; lines may be sent twice
                write_json(self._folder / MQTT, {"to": self._topic.shown, "sent_bytes": self._sent})
                self._saved = self._sent

    def _log_connection(self, client: object, data: object, flags: object, reason: ReasonCode, more: object) -> None:
        if reason.is_failure:
            self._warn(f"refuses: {reason}")
        self._warned = bool(reason.is_failure)

    def _warn(self, problem: str) -> None:
        """Warn once, until the broker is there again."""
        if not self._warned:
            _log.warning("%s %s; predictions wait in the file until it is back", self._topic.shown, problem)
        self._warned = True
