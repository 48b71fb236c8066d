"""Metrics of a run for Prometheus, over HTTP and in a file."""

import contextlib
import json
import re
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest
import yaml
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from remtta.deployment import metrics
from remtta.deployment.many_streams import adapt_streams
from remtta.deployment.metrics import BUCKETS_S, Metrics, parse_metrics_address
from remtta.errors import UsageError
from remtta.methods.tent import TentConfig
from remtta.options import GuardOptions, RunOptions
from remtta.pipeline.build import AdaptationConfig
from remtta.runs.summary import RunSummary
from remtta.streams.sources import open_stream
from tests.command import refusal_of
from tests.conftest import draw_folder, free_port, tiny_vit
from tests.records import lines_of
from tests.runs.tiny import CONFIGS, Each, adapt_tiny

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


@pytest.fixture
def served() -> Iterator[tuple[Metrics, str]]:
    port = free_port()
    with contextlib.closing(Metrics(("127.0.0.1", port))) as metrics:
        yield metrics, f"http://127.0.0.1:{port}/metrics"


def scrape(url: str) -> dict[str, Metric]:
    with urlopen(url, timeout=10) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        return {family.name: family for family in families}


def value(families: dict[str, Metric], name: str, stream: str = "") -> float:
    family = families[re.sub("_(total|count|sum)$", "", name)]
    (found,) = [s.value for s in family.samples if s.name == name and s.labels.get("stream", "") == stream]
    return float(found)


def test_counts_grow_and_agree_with_those_of_the_run(served: tuple[Metrics, str], frames: Path, tmp_path: Path) -> None:
    metrics, url = served
    seen: list[dict[str, Metric]] = []

    def look(summary: RunSummary) -> None:
        seen.append(scrape(url))
        assert value(seen[-1], "remtta_frames_total") == summary.num_frames
        assert value(seen[-1], "remtta_running") == 1

    (frames / "broken.png").write_bytes(b"no picture")
    assert value(scrape(url), "remtta_loading") == 1
    summary = adapt_tiny(frames, tmp_path / "run", callbacks=[metrics, Each(look)])
    updates = [value(each, "remtta_updates_total") for each in seen]
    assert updates == sorted(updates) and updates[-1] == summary.num_updates > 1
    last = scrape(url)
    assert value(last, "remtta_running") == value(last, "remtta_failed") == value(last, "remtta_loading") == 0
    assert value(last, "remtta_skipped_total") == 1
    assert 0 < value(last, "remtta_entropy_nats") < 3
    counts = {s.labels["le"]: s.value for s in last["remtta_latency_seconds"].samples if "le" in s.labels}
    assert list(counts.values()) == sorted(counts.values()) and len(counts) == len(BUCKETS_S) + 1
    assert counts["+Inf"] == summary.num_predicted
    for name in ("remtta_read_seconds", "remtta_decode_seconds"):
        assert value(last, f"{name}_count") == summary.num_frames and value(last, f"{name}_sum") > 0
    (info,) = last["remtta_run_info"].samples
    assert info.labels["method"] == "rem"


def test_a_lead_that_is_not_finite_is_left_out(served: tuple[Metrics, str], frames: Path, tmp_path: Path) -> None:
    metrics, url = served
    options = {"guard": GuardOptions("warn")}
    adapt_tiny(frames, tmp_path / "run", "tent", config=TentConfig(lr=1000.0), options=options, callbacks=[metrics])
    assert lines_of(tmp_path / "run" / "events.jsonl")[0]["event"] == "warning"
    assert not scrape(url)["remtta_guard_lead"].samples


def test_each_stream_of_a_site_is_reported_by_its_name(served: tuple[Metrics, str], tmp_path: Path) -> None:
    metrics, url = served
    streams = {
        name: open_stream(draw_folder(tmp_path / name, range(size), "{}.png")) for name, size in (("a", 2), ("b", 5))
    }
    setup = AdaptationConfig(config=CONFIGS["rem"], options=RunOptions(batch_size=2))
    adapt_streams(tiny_vit(), streams, tmp_path / "site", setup, callbacks=[metrics])
    told = scrape(url)
    assert (value(told, "remtta_frames_total", "a"), value(told, "remtta_frames_total", "b")) == (2, 5)


@pytest.mark.parametrize(("limit", "value", "first"), [("IDLE_TIMEOUT_S", 0.1, 0), ("MAX_CLIENTS", 2, 2)])
def test_idle_clients_are_sent_away(limit: str, value: float, first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, limit, value)
    with contextlib.ExitStack() as opened:
        opened.enter_context(contextlib.closing(Metrics(("127.0.0.1", port := free_port()))))
        clients = [opened.enter_context(socket.create_connection(("127.0.0.1", port), timeout=5)) for _ in range(4)]
        assert all(client.recv(1) == b"" for client in clients[first:])


def test_a_histogram_counts_what_is_below_each_edge() -> None:
    from remtta.runs.latencies import Latencies

    latencies = Latencies()
    for seconds, count in ((1e-9, 1), (0.004, 2), (0.3, 3), (1e9, 4)):
        latencies.add(seconds, count)
    assert latencies.cumulative_counts([0.005, 0.25, 0.5]) == [3, 3, 6, 10]


@pytest.mark.parametrize("address", ["host", "host:", "host:x", ":0", ":70000", ":²"])
def test_an_invalid_address_is_refused(address: str) -> None:
    with pytest.raises(UsageError, match="--metrics takes PORT or HOST:PORT"):
        parse_metrics_address(address)


def test_addresses() -> None:
    assert parse_metrics_address("9108") == parse_metrics_address(":9108") == ("127.0.0.1", 9108)
    assert parse_metrics_address("0.0.0.0:9108") == ("0.0.0.0", 9108)
    assert parse_metrics_address("[::1]:1") == ("::1", 1)


def test_what_cannot_be_had_is_reported_in_one_line_before_anything_is_loaded(
    frames: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    adapt: list[str | Path] = ["adapt", frames, "--output", tmp_path / "run", "--metrics"]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert "choose another port" in refusal_of(capfd, *adapt, f"127.0.0.1:{taken.getsockname()[1]}")
    assert "or a host of this machine" in refusal_of(capfd, *adapt, "a..b:9108")
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    assert 'pip install "prometheus-client>=' in refusal_of(capfd, *adapt, ":9108")
    assert not (tmp_path / "run").exists()


def test_dashboard_and_alerts_name_metrics_that_there_are(served: tuple[Metrics, str], tmp_path: Path) -> None:
    metrics, url = served
    adapt_tiny(draw_folder(tmp_path / "in", range(2), "{}.png"), tmp_path / "run", callbacks=[metrics])
    families = scrape(url)
    known = {sample.name for family in families.values() for sample in family.samples} | set(families)
    known |= {f"{name}_total" for name in families}
    rules = yaml.safe_load((EXAMPLES / "prometheus_alerts.yml").read_text())["groups"][0]["rules"]
    panels = json.loads((EXAMPLES / "grafana.json").read_text())["panels"]
    texts = [rule["expr"] for rule in rules] + [target["expr"] for panel in panels for target in panel["targets"]]
    named = {name for text in texts for name in re.findall(r"remtta_\w+", text)}
    assert len(named) > 10 and named <= known
