"""What a container may use of its machine."""

import platform
import sys
from pathlib import Path

import pytest
import torch

from remtta import machine
from remtta.machine import machine_bytes, num_cores, processor_name, usable_cores
from remtta.models import peak_memory

MIB = 2**20
OLD = {
    "cpu,cpuacct/box/cpu.cfs_quota_us": "{quota}",
    "cpu,cpuacct/box/cpu.cfs_period_us": "100000",
    "cpu,cpuacct/cpu.cfs_quota_us": "-1",
    "cpu,cpuacct/cpu.cfs_period_us": "100000",
    "memory/box/memory.limit_in_bytes": f"{300 * MIB}",
    "memory/memory.limit_in_bytes": f"{2**62}",
}
NEW = {"box/cpu.max": "max 100000", "cpu.max": "{quota} 100000", "box/memory.max": f"{300 * MIB}", "memory.max": "max"}


def test_a_processor_is_named_by_its_model_if_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_PROCESSORS", tmp_path / "cpuinfo")
    assert processor_name() == (platform.processor() or platform.machine())
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: A CPU @ 2.00GHz\n\nprocessor\t: 1\n")
    assert processor_name() == "A CPU @ 2.00GHz"


@pytest.mark.parametrize("quota", [50_000, 150_000])
@pytest.mark.parametrize(
    ("own", "files"),
    [("5:cpu,cpuacct:/box\n4:memory:/box\n3:pids:/\n", OLD), ("0::/box\n", NEW)],
    ids=["version 1", "version 2"],
)
def test_a_container_has_what_its_control_groups_allow(
    quota: int, own: str, files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text.format(quota=quota) + "\n")
    if "cpu,cpuacct:" in own:
        (tmp_path / "cpu").symlink_to("cpu,cpuacct")
    (tmp_path / "own").write_text(own)
    monkeypatch.setattr(machine, "_PROCESS_CGROUPS", tmp_path / "own")
    monkeypatch.setattr(machine, "_CGROUPS", tmp_path)
    monkeypatch.setattr(machine, "usable_cores", lambda: 16)
    assert (num_cores(), machine_bytes()) == (-(-quota // 100_000), 300 * MIB)


def test_without_control_groups_all_usable_cores_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_PROCESS_CGROUPS", tmp_path / "missing")
    assert num_cores() == usable_cores() >= 1


def test_where_peak_memory_cannot_be_measured_it_is_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peak_memory, "_STATUS", tmp_path / "absent")
    monkeypatch.setitem(sys.modules, "resource", None)  # as on Windows
    assert peak_memory.peak_bytes(torch.device("cpu")) == 0
