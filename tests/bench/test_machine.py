from __future__ import annotations

from pathlib import Path

import pytest

from remtta.bench import measure
from remtta.bench.machine import joules, processor
from remtta.bench.measure import run_bench
from remtta.bench.options import FORWARD, BenchOptions
from remtta.options import ModelOptions
from tests.conftest import TINY


@pytest.mark.parametrize(
    ("lines", "cpu", "instructions"),
    [
        (
            ["model name\t: AMD EPYC", "flags\t\t: fpu avx2 avx512f avx512_vnni avx512_bf16"],
            "AMD EPYC",
            ["AVX2", "AVX-512", "VNNI", "bf16"],
        ),
        (
            ["model name\t: Intel Xeon", "flags\t\t: avx2 avx_vnni avx512_vnni amx_bf16"],
            "Intel Xeon",
            ["AVX2", "VNNI", "AMX bf16"],
        ),
        (["BogoMIPS\t: 50.00", "Features\t: fp asimd asimddp"], None, ["NEON", "dot products"]),
        ([], None, []),
    ],
)
def test_the_processor_is_told(tmp_path: Path, lines: list[str], cpu: str | None, instructions: list[str]) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("\n".join(["processor\t: 0", *lines, "", "processor\t: 1", "flags\t: sve"]))
    told = processor(cpuinfo)
    assert told["instructions"] == instructions
    assert cpu is None or told["cpu"] == cpu
    assert told["cores"] and told["used_by_torch"]
    assert processor(tmp_path / "none")["instructions"] == []


def test_energy_is_that_of_all_processors_where_it_can_be_read(tmp_path: Path) -> None:
    assert joules(tmp_path) is None
    for name, microjoules in {"intel-rapl:0": "2500000", "intel-rapl:1": "500000", "intel-rapl:0:0": "9"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "energy_uj").write_text(microjoules)
    assert joules(tmp_path) == 3.0
    (tmp_path / "intel-rapl:1" / "energy_uj").write_text("")
    assert joules(tmp_path) is None


def test_time_of_the_cores_and_energy_are_for_a_thousand_images(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [(10.0, 14.0), (1.0, 3.0), (90.0, 2.0)]  # before and after each; the counter starts over once
    products = [(0.0, 0.0)] * 2
    counter = iter([joules for step in steps for pair in (step, *products) for joules in pair])
    monkeypatch.setattr(measure, "joules", lambda: next(counter))
    model = ModelOptions("vit_tiny_patch16_224", model_kwargs=TINY)
    options = BenchOptions(model, batch_size=4, repeats=3, memory=False, subjects=(FORWARD,))
    (measured,) = run_bench(options)
    assert measured.joules_per_1000 == (4 + 2) / 2 * 1000 / 4
    assert 0 < measured.cpu_s_per_1000 < 1000
