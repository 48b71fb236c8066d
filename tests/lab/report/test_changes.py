"""Where a stream changed, and what the report shows of it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from remtta.lab.report.changes import find_changes
from remtta.lab.report.charts import over_time, read_series
from tests.conftest import draw_image

BATCHES, FRAMES = 40, 20


def batches_of(*conditions: float, seed: int = 0, drift: float = 0.0) -> list[dict[str, Any]]:
    """Batches whose mean logits are noise around another point in each condition."""
    random = np.random.default_rng(seed)
    points = np.repeat(random.normal(size=(len(conditions), 16)) * np.array(conditions)[:, None], BATCHES, axis=0)
    walk = drift * random.normal(size=points.shape).cumsum(axis=0)
    means = points + walk + random.normal(size=points.shape)
    return [
        {
            "frame": FRAMES * number,
            "frames": FRAMES,
            "shift": 1.0 + number,
            "disagreement": 0.01 * number,
            "sketch": mean,
        }
        for number, mean in enumerate(means.round(4).tolist())
    ]


@pytest.mark.parametrize("seed", range(5))
def test_changes_are_found_where_they_are(seed: int) -> None:
    changes = find_changes(batches_of(0, 3, 0, 3, seed=seed))
    assert [before + 1 for before, _ in changes] == pytest.approx([800, 1600, 2400], abs=FRAMES)
    assert all(0 < after - before - 1 <= FRAMES for before, after in changes)


def test_nothing_is_found_in_noise_a_slow_drift_or_a_few_batches() -> None:
    assert not any(find_changes(batches_of(0, 0, 0, seed=seed)) for seed in range(20))
    assert not any(find_changes(batches_of(0, 0, 0, seed=seed, drift=0.1)) for seed in range(20))
    assert find_changes(batches_of(0, 9)[BATCHES - 5 : BATCHES + 5]) == []
    assert find_changes([{**batch, "sketch": [0.0] * 16} for batch in batches_of(0)]) == []
    assert find_changes([{"frame": 0, "frames": 3}] * 50) == []


def write_run(folder: Path, batches: list[dict[str, Any]], **video: Any) -> int:
    folder.mkdir()
    count = FRAMES * len(batches)
    common = {"class": 1, "label": "a", "prob": 0.5, "entropy": 0.4, "weight": 0.5, **video}
    rows = [
        {"index": index, "source": f"{index}.png", **common, "temperature": 1 - index / 2000} for index in range(count)
    ]
    for name, lines in (("predictions", rows), ("batches", batches)):
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return count


def test_the_frames_around_a_change_are_shown(tmp_path: Path) -> None:
    series = read_series(tmp_path / "run", write_run(tmp_path / "run", batches_of(0, 5)))
    assert [(row["side"], row["source"]) for row in series.at_changes] == [
        ("before", "799.png"),
        ("after", f"{800 + FRAMES}.png"),
    ]
    chart = over_time(series).text
    assert "Changes of the stream: 800." in chart
    assert "shift 1.00 at first, 80.00 at last" in chart and "disagreement in % 0.00 at first, 79.00 at last" in chart
    assert "temperature 1.00 at first" in chart and "weight" not in chart.split("The adapted")[0]


def test_of_a_video_saved_frames_near_the_change_are_shown(tmp_path: Path) -> None:
    run = tmp_path / "run"
    count = write_run(run, batches_of(0, 5), frame=0)
    assert read_series(run, count).at_changes == []
    (run / "saved_frames").mkdir()
    for index in (3, 700, 810, 900):
        draw_image(index).save(run / "saved_frames" / f"saved_{index:06d}.png")
    shown = read_series(run, count).at_changes
    assert [(row["index"], row["side"], Path(row["source"]).name) for row in shown] == [
        (700, "before", "saved_000700.png"),
        (900, "after", "saved_000900.png"),
    ]
