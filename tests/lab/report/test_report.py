"""The page, in a real browser: its charts are there, it fits, and what files say is text."""

import json
import re
import shutil
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from remtta.lab.report.charts import Chart, Series, draw, layers, over_time, read_series
from remtta.lab.report.page import write_report
from remtta.lab.tables import outcome, table_rows
from remtta.options import GuardOptions
from tests.command import refusal_of, remtta_here
from tests.conftest import draw_folder, draw_image
from tests.lab.evaluation.trees import evaluate_tiny, open_tree, write_tree
from tests.records import json_of
from tests.runs.tiny import adapt_tiny

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
HOSTILE = "\x1b</svg><script>document.title='stolen'</script>$x^"
IMAGE = "<img src=x onerror=alert(1)>.png"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two runs and an evaluation; a label and a file name of the first run are hostile."""
    root = tmp_path_factory.mktemp("reported")
    draw_folder(root / "frames", range(5))
    draw_image(5).save(root / "frames" / IMAGE)
    for name, method in (("first", "tent"), ("second", "remtta")):
        adapt_tiny(root / "frames", root / name, method, options={"guard": GuardOptions(answer="both")})
    path = root / "first" / "predictions.jsonl"
    path.write_text(path.read_text().replace('"label": null', f'"label": {json.dumps(HOSTILE)}'))
    path = root / "second" / "predictions.jsonl"
    first, *rows = (
        path.read_text().replace('"update"', '"estimate": {"answers": 0.71, "source": 0.64}, "update"').splitlines()
    )
    path.write_text("\n".join([first.replace("0.71", "0.65").replace('"label": null', '"label": "a"'), *rows, ""]))
    event = {"time": "2026-01-01T00:00:00+00:00", "frame": 3, "event": "rollback", "reason": "drift", "lead": -0.4}
    (root / "second" / "events.jsonl").write_text(json.dumps(event) + "\n")
    evaluate_tiny(open_tree(write_tree(root / "tree")), root / "eval", ["source", "tent"], batch_size=8)
    (root / "eval" / "plots").mkdir()
    draw_image(0).save(root / "eval" / "plots" / "running_error.png")
    return [root / "first", root / "second", root / "eval"]


@pytest.fixture(scope="module")
def page(folders: list[Path]) -> Path:
    target = folders[0].parent / "report.html"
    assert remtta_here("report", *folders, "-o", target) == 0
    return target


class Reader(HTMLParser):
    """Tags, attributes and text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_stands_alone_and_says_what_the_files_do(page: Path, folders: list[Path]) -> None:
    content = page.read_text()
    reader = Reader(content)
    assert len(content.encode()) < 1_000_000
    for _, attributes in reader.tags:
        for name in ("src", "href", "xlink:href"):
            assert re.match(r"data:image/(jpeg|svg\+xml);base64,|#", attributes.get(name) or "#"), attributes
    charts = [attributes for tag, attributes in reader.tags if attributes.get("class") == "chart"]
    # Over time and layers of each run; estimates and classes of the second, as the first predicts a single class.
    assert len(charts) == 2 * 2 + 2
    assert (
        not re.search(r"\bhead\b", " ".join(str(chart["alt"]) for chart in charts))
        and "head, by centering: " in reader.text
    )
    verdicts = re.findall(r'class="verdict">([^<]*)<', content)
    assert (
        verdicts[0] == f"first: {UNKNOWN}"
        and verdicts[1] == "second: 2 updates, 1 alarm of the guard; not in doubt at the end."
        and verdicts[2] == f"eval: {outcome(json_of(folders[2] / 'results.json'))}"
    )
    assert any(attributes.get("alt", "").startswith("Error of each method over") for _, attributes in reader.tags)  # type: ignore[union-attr]
    assert any("answers 65 % at first, 71 % at last; source 64 %" in (each["alt"] or "") for each in charts)
    assert all(len(attributes["alt"] or "") > 40 for attributes in charts)
    ids = [attributes["id"] for _, attributes in reader.tags if "id" in attributes]
    assert len(set(ids)) == len(ids)
    assert "script" not in [tag for tag, _ in reader.tags]
    assert sum(tag == "img" and bool(attributes["alt"]) for tag, attributes in reader.tags) >= 12
    record = json.loads((folders[0] / "run.json").read_text())
    assert f"{record['counts']['frames']}, 0 skipped" in reader.text and "1 rollback" in content
    results = json.loads((folders[2] / "results.json").read_text())
    for row in table_rows(results)[1]:
        assert "".join(row) in reader.text  # as in the terminal, with the signs of insignificance
    assert "SE standard error of the mean" in reader.text and (sentence := outcome(results)) and sentence in reader.text


UNKNOWN = "2 updates; the guard was off, so whether they help is unknown."
DOUBT = {"frame": 3, "event": "doubt", "lead": -0.05}
TRUST = {"frame": 3, "event": "trust", "lead": 0.01}
RESTART = {**DOUBT, "event": "restart"}
ALARM = {"frame": 3, "event": "rollback", "reason": "drift"}
WARNING = {"frame": 3, "event": "warning", "reason": "drift"}


def verdicts_of(tmp_path: Path, *folders: Path, **options: Any) -> list[str]:
    write_report(folders, tmp_path / "x.html", **options)
    return re.findall(r'class="verdict">([^<]*)<', (tmp_path / "x.html").read_text())


@pytest.mark.parametrize(
    "events, record, expected",
    [
        ([], {}, "2 updates, no sign of harm."),
        ([DOUBT], {"lead": -0.25}, "2 updates; the run ended in doubt, lead -25 %."),
        ([DOUBT], {}, "2 updates; the run ended in doubt, lead -5 %."),
        ([DOUBT, {"frame": 4, "event": "resumed"}], {}, "2 updates; the run ended in doubt, lead -5 %."),
        ([DOUBT, TRUST], {"lead": 0.01}, "2 updates, 1 doubt of the guard; not in doubt at the end."),
        ([DOUBT, RESTART], {}, "2 updates, 1 restart and 1 doubt of the guard; not in doubt at the end."),
        ([ALARM, DOUBT], {"alarms": 1}, "2 updates, 1 alarm of the guard; the run ended in doubt, lead -5 %."),
        ([ALARM, ALARM], {"alarms": 2}, "2 updates, 2 alarms of the guard; not in doubt at the end."),
        ([WARNING], {"alarms": 1}, "2 updates, 1 alarm of the guard; the run ended in doubt (drift)."),
        ([ALARM, DOUBT], {"retired": True}, "Adaptation did harm and has ended: the source model predicts."),
    ],
)  # fmt: skip
def test_the_verdict_says_if_the_run_ended_in_doubt(
    folders: list[Path], tmp_path: Path, events: list[Any], record: dict[str, Any], expected: str
) -> None:
    run = shutil.copytree(folders[1], tmp_path / "run")
    (run / "events.jsonl").write_text("".join(f"{json.dumps(event)}\n" for event in events))
    content = json_of(run / "run.json")
    content["guard"] = {**content["guard"], "lead": 0.0, **record}
    (run / "run.json").write_text(json.dumps(content))
    assert verdicts_of(tmp_path, run) == [f"run: {expected}"]


def test_the_verdict_knows_resets_running_runs_scores_and_guards_that_are_off(
    folders: list[Path], tmp_path: Path
) -> None:
    run = shutil.copytree(folders[1], tmp_path / "run")
    (run / "events.jsonl").write_text(json.dumps(DOUBT) + "\n")
    *before, last = map(json.loads, (run / "predictions.jsonl").read_text().splitlines())
    (run / "batches.jsonl").write_text(json.dumps({"frame": last["index"], "frames": 1, "source": []}) + "\n")
    labels = tmp_path / "labels.csv"
    labels.write_text(f"{last['source']},{last['class']}\n")
    (known,) = verdicts_of(tmp_path, run, labels=labels)
    assert known.startswith("run: error 0.0 % (no SE") and known.endswith(". The run ended in doubt, lead -5 %.")
    content = json_of(run / "run.json")
    content["guard"]["lead"] = 0.1
    (run / "run.json").write_text(json.dumps({**content, "exit_reason": "running"}))
    assert verdicts_of(tmp_path, run) == ["run: 2 updates; the run ended in doubt, lead -5 %."]  # it was killed
    content["options"]["guard"]["action"], content["guard"]["lead"] = "off", -0.25
    (run / "run.json").write_text(json.dumps(content))
    assert verdicts_of(tmp_path, run) == [
        "run: 2 updates; the guard was off, lead -25 %, so whether they help is unknown."
    ]
    shutil.copy(folders[1] / "run.json", run)
    reset = [{**row, "update": 2} for row in before] + [{**last, "update": 0}]  # as --reset-every
    (run / "predictions.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in reset))
    assert verdicts_of(tmp_path, run) == ["run: 2 updates, 1 doubt of the guard; not in doubt at the end."]


def test_runs_come_before_evaluations_in_verdicts_as_in_charts(folders: list[Path], tmp_path: Path) -> None:
    first, _, evaluation = folders
    assert [line.split(":")[0] for line in verdicts_of(tmp_path, evaluation, first)] == ["first", "eval"]


def test_charts_of_runs_share_their_axes() -> None:
    def limits(chart: Chart | None) -> Any:
        assert chart
        return {name: (axes.get_xlim(), axes.get_ylim()) for name, axes in chart.axes.items()}

    short = Series(index=[*range(10)], entropy=[6.0, 1.0] * 5, weight=[0.5] * 10)
    events = [DOUBT, {**DOUBT, "frame": 9, "lead": -0.4}]
    long = Series(index=[*range(20)], entropy=[2.0, 1.0] * 10, weight=[0.5] * 20, events=events)
    charts = [over_time(run) for run in (short, long)]
    alone = [limits(chart)["entropy in nats"] for chart in charts]
    assert len(draw(["a", "b"], charts)) == 2
    shared = [limits(chart)["entropy in nats"] for chart in charts]
    assert shared[0] == shared[1] == (alone[1][0], alone[0][1])
    low, high = limits(charts[1])["lead in %"][1]
    assert low < -42 and high > 0  # no dot on an edge, and the models' equality is in view
    bars = [layers([{"layer": f"norm{number}", "rms": number * size, "max": 1.0} for number in range(count)])
            for size, count in ((0.01, 4), (0.1, 2))]  # fmt: skip
    assert draw(["a", "b", "c"], [bars[0], None, bars[1]])[1] == ""
    (sizes, rows), (other_sizes, other_rows) = (limits(bar)["change"] for bar in bars)
    assert sizes == other_sizes and rows != other_rows


@pytest.fixture
def shown(page: Path) -> Iterator[Any]:
    """The page in Chromium, and all that its console said."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": 360, "height": 740}, color_scheme="dark", offline=True)
        said: list[str] = []
        tab.on("console", lambda message: said.append(message.text))
        tab.on("pageerror", lambda error: said.append(str(error)))
        tab.on("request", lambda request: said.append(request.url) if request.url.startswith("http") else None)
        tab.goto(page.as_uri())
        yield tab
        browser.close()
        assert said == []


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
@pytest.mark.filterwarnings("ignore")
def test_a_browser_shows_it_and_is_not_fooled(shown: Any) -> None:
    assert shown.title() == "remtta: first, second, eval"
    assert shown.evaluate("document.documentElement.scrollWidth") <= 360  # no sideways scrolling on a phone
    assert shown.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(22, 24, 28)"
    charts = shown.get_by_role("img", name="Over 6 frames: entropy")
    assert charts.count() == 2 and charts.first.bounding_box()["width"] > 300
    assert shown.get_by_text(IMAGE).count() > 0
    assert shown.evaluate("[...document.images].every(image => image.complete && image.naturalWidth > 0)")


def test_classes_are_those_before_smoothing_and_videos_are_not_pictured(tmp_path: Path) -> None:
    raw = {"class": 2, "label": None, "prob": 0.5}
    still: dict[str, Any] = {"index": 0, **raw, "class": 1, "entropy": 0.1, "weight": 0.5, "raw": raw}
    (tmp_path / "predictions.jsonl").write_text(json.dumps(still) + "\n" + json.dumps({**still, "frame": 0}) + "\n")
    series = read_series(tmp_path, 2)
    assert series.by_model == ({"2": 2}, {"2": 2}) and series.unsure == [still]


def test_scores_on_labelled_frames_are_shown(
    folders: list[Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    labels, target = tmp_path / "labels.csv", tmp_path / "x.html"
    row = json.loads((folders[0] / "predictions.jsonl").read_text().splitlines()[0])
    labels.write_text(f"{row['source']},{row['class']}\n")
    assert remtta_here("report", folders[0], "-o", target, "--labels-file", labels) == 0
    reader = Reader(target.read_text())
    known = "error 0.0 % (no SE: none wrong) on 1 labelled frame; what the source model predicts is not recorded."
    assert f"{known} In %:framesnerrorSE" in reader.text and f"first: {UNKNOWN}" in reader.text
    labels.write_text(f"{row['source']},{row['label']}\n")
    assert remtta_here("report", *folders, "-o", target, "--labels-file", labels, "--overwrite") == 0
    text = Reader(target.read_text()).text
    assert f"second has no score: --labels-file: {labels}: no prediction of" in capfd.readouterr().err
    assert f"{known} In %:" in text and f"second--labels-file: {labels}: no prediction of {folders[1]} is" in text
    assert "no prediction of" in refusal_of(
        capfd, "report", folders[1], "-o", tmp_path / "y.html", "--labels-file", labels
    )
    labels.write_text(f"{row['source']},{row['class']}\n")
    source = folders[0].parent / "source"
    adapt_tiny(folders[0].parent / "frames", source, "source")
    assert remtta_here("report", source, "-o", target, "--labels-file", labels, "--overwrite") == 0
    assert (
        "source: error 0.0 % (no SE: none wrong) on 1 labelled frame, source model 0.0 %"
        in Reader(target.read_text()).text
    )


def test_what_cannot_be_reported_is_reported(
    folders: list[Path], page: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "x.html"
    assert "exists; choose another" in refusal_of(capfd, "report", folders[0], "-o", page)
    assert "must end in .html" in refusal_of(capfd, "report", folders[0], "-o", tmp_path / "x.pdf")
    assert "no such folder" in refusal_of(capfd, "report", tmp_path / "nowhere", "-o", target)
    line = refusal_of(capfd, "report", folders[0], "-o", tmp_path / "nowhere" / "x.html")
    assert "nowhere: no such folder; make it first" in line
    assert "holds no run" in refusal_of(capfd, "report", tmp_path, "-o", target)
    (tmp_path / "site.json").write_text('{"exit_reason": "completed", "streams": {}}')
    assert "holds the runs of many streams; name them" in refusal_of(capfd, "report", tmp_path, "-o", target)
    damaged = shutil.copytree(folders[0], tmp_path / "damaged")
    rows = (damaged / "predictions.jsonl").read_text()
    (damaged / "predictions.jsonl").write_text(rows.replace('"prob": 0', '"prob": "0', 1))
    assert "predictions.jsonl, line 1 is damaged" in refusal_of(capfd, "report", damaged, "-o", target, code=1)
    assert not target.exists()
