"""The container's files in examples/container: what they start, mount and say fits this version."""

import contextlib
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from remtta.streams.sources import open_stream
from tests.conftest import draw_folder
from tests.records import rows_of
from tests.runs.tiny import adapt_tiny
from tests.streams.servers import in_thread
from tests.test_documents import is_taken
from tests.test_examples import script

FOLDER = Path(__file__).parent.parent / "examples" / "container"


def services() -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((FOLDER / "compose.yaml").read_text())
    return dict(content["services"])


def test_hadolint_finds_nothing_in_the_containerfile() -> None:
    hadolint = Path(sys.executable).parent / "hadolint"
    done = subprocess.run([hadolint, FOLDER / "Containerfile"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_the_containerfile_copies_what_is_there_and_installs_extras_that_exist() -> None:
    top = FOLDER.parent.parent
    lines = (FOLDER / "Containerfile").read_text().splitlines()
    copied = [shlex.split(line)[1:-1] for line in lines if line.startswith("COPY") and "--from" not in line]
    assert all((top / name).exists() for names in copied for name in names) and len(copied) == 3
    [page] = re.findall(r"docs/\w+\.md", lines[0])
    assert (top / page).exists()
    extras = next(line for line in lines if "/src[" in line).partition("[")[2].partition("]")[0].split(",")
    assert all(f"\n{extra} = [" in (top / "pyproject.toml").read_text() for extra in extras)


def test_the_composed_commands_are_taken_and_what_is_mounted_is_there() -> None:
    for name in ("drive", "remtta"):
        command, *words = shlex.split(services()[name]["command"])
        assert is_taken(command, words)
    mounts = [mount for service in services().values() for mount in service["volumes"] if mount.startswith(".")]
    assert len(mounts) == 6 and all((FOLDER / mount.partition(":")[0]).is_file() for mount in mounts)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool, of Prometheus")
def test_promtool_takes_the_configuration_and_the_alerts(tmp_path: Path) -> None:
    for path in (FOLDER / "prometheus.yml", FOLDER.parent / "prometheus_alerts.yml"):
        shutil.copy(path, tmp_path)
    done = subprocess.run(["promtool", "check", "config", tmp_path / "prometheus.yml"], capture_output=True, text=True)
    assert done.returncode == 0 and "5 rules found" in done.stdout + done.stderr, done.stderr


def test_a_run_on_the_simulated_camera_is_healthy(tmp_path: Path) -> None:
    pictures = script("container/camera").jpegs(draw_folder(tmp_path / "in", range(3), "{}.png", 64, 64))
    server = script("container/camera").server(pictures, 0, 20.0)
    address = f"http://127.0.0.1:{server.server_port}/"
    with in_thread(server), contextlib.closing(open_stream(address, limit=6)) as stream:
        adapt_tiny(stream, tmp_path / "run", health=tmp_path / "health.json")
    assert len([row for row in rows_of(tmp_path / "run") if "class" in row]) == 6
    assert script("container/healthy").trouble(tmp_path / "health.json", 60) is None


def test_a_silent_and_a_failed_run_are_found_ill(tmp_path: Path) -> None:
    trouble, file = script("container/healthy").trouble, tmp_path / "health.json"
    assert trouble(file, 60).startswith("no health file: ")
    file.write_text(json.dumps({"time": "2026-01-01T00:00:00+00:00", "state": "running"}))
    assert trouble(file, 60).startswith("silent for ")
    file.write_text(json.dumps({"time": "2026-01-01T00:00:00+00:00", "state": "error", "reason": "no camera"}))
    assert trouble(file, 1e12) == "no camera"
