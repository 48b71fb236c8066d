"""Tables, errors by class, and the marking of insignificant differences."""

import math
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pylatexenc.latexwalker import LatexWalker

from remtta.errors import UsageError
from remtta.lab.evaluation.domains import Dataset
from remtta.lab.evaluation.results import summarise
from remtta.lab.evaluation.trial import evaluation_rows
from remtta.lab.evaluation.trial_writer import TrialRecord
from remtta.lab.tables import latex_table, markdown_table, notes, outcome, plain_table, table_rows
from remtta.pipeline.prediction import Prediction
from remtta.runs.loop import BatchResult
from remtta.runs.rows import RowFormat
from remtta.streams.batches import Batch
from remtta.streams.prefetch import DecodedFrame
from tests.lab.evaluation.trees import evaluate_tiny, tally_of
from tests.records import rows_of

TIMING = {"seconds": 1.0, "peak_memory_bytes": 1}
RECORD = TrialRecord("", 0, {}, 10, 0, 0, 0, None, 1.0, 0.0, 1, None, 0, [], TIMING)


def rows_from(method: str, right: str, domain: str = "my_fog", seed: int = 0, ranks: str = "1") -> list[dict[str, Any]]:
    """Return rows for ten classes: 1 is right, 0 predicts class 4 for class 3."""
    return [
        {"method": method, "seed": seed, "domain": domain, "prob": 0.5}
        | {"source": f"{domain}/a/{number}.png", "class": 3, "label_true": 3 if sign == "1" else 4}
        | {"rank_true": int(ranks[number % len(ranks)])}
        for number, sign in enumerate(right)
    ]


def results_of(tmp_path: Path, *trials: list[dict[str, Any]], num_classes: int = 5) -> dict[str, Any]:
    records = [replace(RECORD, method=rows[0]["method"], seed=rows[0]["seed"]) for rows in trials]
    rows = [row for rows in trials for row in rows]
    domains = list(dict.fromkeys(row["domain"] for row in rows))
    return {"settings": {}, "methods": summarise(tally_of(tmp_path, *rows), records, domains, num_classes)}


def test_a_difference_within_its_standard_error_is_marked(tmp_path: Path) -> None:
    # Of sixteen: "a" mends four and spoils one: 18.75 points, 2 * sqrt(5) / 16 = 28.0. "b" mends eight: 50 and 35.4.
    source, a, b = "0" * 8 + "1" * 8, "1" * 4 + "0" * 4 + "0" + "1" * 7, "1" * 16
    results = results_of(tmp_path, rows_from("source", source), rows_from("a", a), rows_from("b", b))
    methods = results["methods"]
    assert methods["a"]["gain"] == methods["a"]["gain_by_domain"]["my_fog"] == pytest.approx(18.75)
    assert methods["a"]["gain_se"] == pytest.approx(100 * math.sqrt(5) / 16)
    assert methods["b"]["gain_by_domain_se"]["my_fog"] == pytest.approx(100 * math.sqrt(8) / 16)
    assert methods["source"]["error_se"]["my_fog"] == methods["source"]["mean_se"] == pytest.approx(12.5)
    assert "gain_se" not in methods["source"]
    by_b, by_a = outcome(results), outcome(results_of(tmp_path, rows_from("source", source), rows_from("a", a)))
    assert by_b == "With b, the mean error falls from 50.0 % (source model) to 0.0 %, by 50.0 points (SE 17.7)."
    assert by_a.endswith("to 31.2 %, by 18.8 points (SE 14.0). This may be chance.")
    worse = results_of(tmp_path, rows_from("source", b), rows_from("a", a))
    assert outcome(worse) == "No method has fewer errors than the source model (0.0 %)."
    assert outcome(results_of(tmp_path, rows_from("a", a))) == ""
    assert outcome(results_of(tmp_path, rows_from("source", source), rows_from("supervised", b))) == ""
    header, rows = table_rows(results)
    assert header == ["error in %", "my_fog", "mean", "SE", "gain", "ECE %", "first 50", "images/s"]
    assert [row[1:5] for row in rows] == [
        ["50.0", "50.0", "12.5", "+0.0"],
        ["≈31.2", "≈31.2", "11.6", "≈+18.8"],
        ["0.0", "0.0", "0.0", "+50.0"],
    ]
    assert plain_table(results).splitlines()[-3:] == notes(results)
    assert notes(results) == [
        "≈ at most 2 standard errors from source, compared image by image",
        "+ in gain: fewer errors than source",
        "SE standard error of the mean, by the number of images",
    ]
    assert "| standard error | my_fog | mean | gain |" in markdown_table(results)
    assert "| a | 11.59 | 11.59 | 13.98 |" in markdown_table(results)


def test_names_of_domains_change_neither_the_table_nor_the_terminal(tmp_path: Path) -> None:
    results = results_of(tmp_path, rows_from("source", "01", domain="a|<img>\n\x1b[31m"))
    assert r"a|<img>\n\x1b[31m" in plain_table(results) and "\x1b" not in plain_table(results)
    assert r"| error in % | a\|&lt;img&gt;\n\x1b[31m | mean |" in markdown_table(results)
    escaped = r"Error in \% & A\textbar{}\textless{}img\textgreater{}\textbackslash{}n\textbackslash{}x1b[31m & Mean & "
    assert escaped in latex_table(results)


def test_a_gain_of_rounding_errors_is_none(tmp_path: Path) -> None:
    """Of equal errors, the mean over three seeds can differ from that of the source model's single one by 1e-14."""
    trials = [rows_from("source", "0011"), *(rows_from("a", "0101", seed=seed) for seed in (0, 1))]
    results = results_of(tmp_path, *trials)
    for gain, told in ((-1e-14, "≈+0.0"), (1e-14, "≈+0.0"), (0.0, "≈+0.0"), (-0.04, "+0.0")):
        results["methods"]["a"] |= {"mean": 50 - gain, "gain": gain, "gain_se": 0.0}
        assert table_rows(results, ["gain"])[1] == [["source", "+0.0"], ["a", told]]
        assert outcome(results).startswith("No method has fewer errors")


def test_the_first_images_of_each_condition_are_counted_on_their_own(tmp_path: Path) -> None:
    """Of sixty images, the method has the first twenty and the last ten wrong; with the second seed from the end."""
    shown = rows_from("a", "0" * 20 + "1" * 30 + "0" * 10)
    trials = rows_from("source", "0" * 30 + "1" * 30), shown, [row | {"seed": 1} for row in reversed(shown)]
    methods = results_of(tmp_path, *trials)["methods"]
    assert methods["source"]["first"]["mean"] == 60 and "gain" not in methods["source"]["first"]
    # Seed 0: 20 of 50 wrong, the source 30. Seed 1, from the end: 10 + 10 of 50, the source 20 of them.
    first = methods["a"]["first"]
    assert [seed["first"]["mean"] for seed in methods["a"]["seeds"].values()] == [40, 40]
    assert (first["mean"], first["error"]) == (40, {"my_fog": 40})
    assert first["gain"] == first["gain_by_domain"]["my_fog"] == pytest.approx((20 + 0) / 2)
    assert first["gain_se"] > 0
    assert table_rows({"methods": methods}, ["first"]) == (
        ["error in %", "first 50"],
        [["source", "60.0"], ["a", "≈40.0"]],
    )


def test_chosen_columns_are_all_that_the_table_has(tmp_path: Path) -> None:
    trials = [rows_from(name, "0011", domain) for name in ("source", "a") for domain in ("fog", "mean", "my_own")]
    results = results_of(tmp_path, *(trials[0] + trials[1] + trials[2], trials[3] + trials[4] + trials[5]))
    for chosen, header in (
        (("gain", "fog"), ["gain", "fog"]),
        (("domains", "ece"), ["fog", "mean", "my_own", "ECE %"]),
        (("speed", "mean"), ["images/s", "mean"]),  # of the domain, which is named so
    ):
        assert table_rows(results, chosen)[0] == ["error in %", *header]
        assert not any(note.startswith("SE") for note in notes(results, chosen))
        assert markdown_table(results, chosen).splitlines()[0] == f"| error in % | {' | '.join(header)} |"
        assert rf"\begin{{tabular}}{{l{'r' * len(header)}}}" in latex_table(results, chosen)
    with pytest.raises(UsageError, match=r'unknown column "top5"; did you mean|choose domains, mean, '):
        table_rows(results, ("top5",))
    with pytest.raises(UsageError, match=r"; choose domains, mean, se, gain, ece, first, speed, fog, my_own$"):
        table_rows(results, ("zzz",))


def results_for_latex(tmp_path: Path) -> dict[str, Any]:
    """Results of methods with and without a spread over seeds, and with the true labels, on strange domains."""
    domains = ("gaussian_noise", "fog+jpeg_compression", "my_own", "50 % {of} ~^\\ & #1 $x_2$ <b>")
    outcomes = {"source": ["0011"], "low=rem": ["0111", "0011"], "supervised": ["1111"]}
    trials = [
        [row for domain in domains for row in rows_from(name, right, domain, seed)]
        for name, rights in outcomes.items()
        for seed, right in enumerate(rights)
    ]
    results = results_of(tmp_path, *trials, num_classes=10)
    results["environment"] = {"command": ["/opt/bin/remtta", "eval", "my c\n\\", "--methods", "source,low=rem"]}
    return results


def test_a_latex_table_has_short_names_and_the_best_in_bold(tmp_path: Path) -> None:
    lines = latex_table(
        results_for_latex(tmp_path), ("gaussian_noise", "fog+jpeg_compression", "mean", "gain")
    ).splitlines()
    assert lines[0].startswith("% ≈ at most 2 standard errors")
    assert "% bold: the best, without upper bounds" in lines
    assert r"% remtta eval 'my c\n\' --methods source,low=rem" in lines
    assert lines[-9:] == [
        r"\begin{tabular}{lrrrr}",
        r"\hline",
        r"Error in \% & Gauss. & Fog+JPEG & Mean & Gain \\",
        r"\hline",
        r"source & $50.0$ & $50.0$ & $50.0$ & $+0.0$ \\",
        r"low=rem & $\approx \mathbf{37.5 \pm 17.7}$ & $\approx \mathbf{37.5 \pm 17.7}$ & "
        r"$\approx \mathbf{37.5 \pm 17.7}$ & $\approx \mathbf{+12.5}$ \\",
        r"supervised & $\approx 0.0$ & $\approx 0.0$ & $\approx 0.0$ & $\approx +50.0$ \\",
        r"\hline",
        r"\end{tabular}",
    ]


def test_a_latex_table_compiles_without_a_package(tmp_path: Path) -> None:
    results = results_for_latex(tmp_path)
    table = latex_table(results)
    LatexWalker(table, tolerant_parsing=False).get_latex_nodes()  # raises for unbalanced braces, $ and environments
    rows = [line for line in table.splitlines() if line.endswith(r"\\")]
    assert {len(re.findall(r"(?<!\\)&", row)) + 1 for row in rows} == {len(table_rows(results)[0])} and len(rows) == 4
    if pdflatex := shutil.which("pdflatex"):
        paper = f"\\documentclass{{article}}\\begin{{document}}\n{table}\\end{{document}}"
        (tmp_path / "paper.tex").write_text(paper, encoding="utf-8")
        run = [pdflatex, "-interaction=nonstopmode", "-halt-on-error", "paper.tex"]
        done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert (done.returncode, (tmp_path / "paper.pdf").is_file()) == (0, True), done.stdout


@pytest.mark.parametrize(("name", "remedy"), [("tent", ", or for a model of CIFAR take tent@cifar"), ("rem", "")])
def test_a_method_that_changes_no_class_is_named_with_the_remedy(
    name: str, remedy: str, tree: Dataset, tmp_path: Path
) -> None:
    methods = {"source": {}, name: {"lr": 1e-12}, f"high={name}": {"lr": 0.1}}
    results = evaluate_tiny(tree, tmp_path / "run", methods, batch_size=4, seeds=(0, 1))
    assert results["methods"][name]["changed_images"] == 0 < results["methods"][f"high={name}"]["changed_images"]
    (note,) = (line for line in plain_table(results).splitlines() if "no image" in line)
    rate = f"raise its learning rate (--set {name}.lr=..., now 1e-12)"
    assert note == f"{name} changed the class of no image; {rate}{remedy}"


def test_errors_have_their_spread_over_seeds(tmp_path: Path) -> None:
    rows = [rows_from("rem", right, seed=seed, ranks="1116") for seed, right in enumerate(("0011", "0111"))]
    results = results_of(tmp_path, *rows, num_classes=10)
    rem = results["methods"]["rem"]
    assert (rem["error"], rem["mean"], rem["top5_error"], rem["top5"]) == ({"my_fog": 37.5}, 37.5, {"my_fog": 25}, 25)
    # 50 and 25: their deviation is 25 / sqrt(2). Wrong in 2, 1, 0, 0 of two seeds: about 3/8, and of four images.
    squares = (5 / 8) ** 2 + (1 / 8) ** 2 + 2 * (3 / 8) ** 2
    for spread, error in ((rem["error_std"]["my_fog"], rem["error_se"]["my_fog"]), (rem["mean_std"], rem["mean_se"])):
        assert spread == pytest.approx(25 / math.sqrt(2)) and error == pytest.approx(100 * math.sqrt(squares) / 4)
    assert rem["gain"] is None and "gain_se" not in rem
    assert [row[1:5] for row in table_rows(results)[1]] == [["37.5 ± 17.7", "37.5 ± 17.7", "20.7", ""]]
    assert "± standard deviation over 2 seeds" in notes(results)


def test_the_top_five_need_more_than_five_classes(tmp_path: Path) -> None:
    ranked = rows_from("source", "0000", ranks="2567")
    of_ten, of_five = (results_of(tmp_path, ranked, num_classes=number) for number in (10, 5))
    assert of_ten["methods"]["source"]["top5"] == 50 and "top-5 error" in table_rows(of_ten)[0]
    assert "top5" not in of_five["methods"]["source"] and "top-5 error" not in table_rows(of_five)[0]


def test_a_rank_counts_the_classes_that_are_likelier(tree: Dataset) -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0], [3.0, 2.0, 1.0], [1.0, 5.0, 5.0], [5.0, 1.0, 5.0]])
    frames = [DecodedFrame(number, "", None, None, torch.zeros(1)) for number in range(4)]
    tied = int(logits[3].topk(1).indices)
    labels = torch.tensor([0, 2, 0, 2 - tied])
    result = BatchResult(Batch(frames, labels), Prediction(logits, torch.zeros(len(logits), dtype=torch.bool)))
    domain = replace(tree.domains[0], labels=labels.numpy())
    rows = evaluation_rows(result, replace(tree, domains=[domain]), [(0, n) for n in range(4)], RowFormat(None), None)
    # Of two that are equally likely one is predicted, and the other is the second.
    assert [row["rank_true"] for row in rows] == [1, 3, 3, 2]


def test_every_class_and_every_mistake_is_counted(tree: Dataset, tmp_path: Path) -> None:
    results = evaluate_tiny(tree, tmp_path / "run", ["source", "rem"], batch_size=8, seeds=(0, 1))
    rows = [row for row in rows_of(tmp_path / "run") if row["method"] == "rem"]
    assert all((row["rank_true"] == 1) == (row["class"] == row["label_true"]) for row in rows)
    assert all(1 <= row["rank_true"] <= 7 for row in rows)
    for number, error in results["methods"]["rem"]["class_error"].items():
        wrong = [row["class"] != row["label_true"] for row in rows if row["label_true"] == int(number)]
        assert len(wrong) == 12 and error == pytest.approx(100 * sum(wrong) / 12)
    beyond = [row["rank_true"] > 5 for row in rows if row["seed"] == 0 and row["domain"] == "fog"]
    assert results["methods"]["rem"]["seeds"]["0"]["top5_error"]["fog"] == pytest.approx(100 * sum(beyond) / 21)
