"""Methods, backbones, commands and callbacks of other packages: those in examples/plugin/ run as built-in ones do, and
wrong ones are refused.
"""

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import typer
from PIL import Image
from torch import nn

from remtta.backbones import families
from remtta.backbones.lookup import backbone_of
from remtta.cli.adapt import find_callbacks
from remtta.cli.application import add_commands
from remtta.cli.usage import Application
from remtta.errors import UsageError
from remtta.lab.evaluation.variants import MethodVariant
from remtta.methods.settings.chosen import STREAM_METHODS
from remtta.methods.table import METHOD_TABLE, REFUSED, find_methods, method_config
from remtta.pipeline.build import AdaptationConfig
from tests.command import refusal_of, remtta_here
from tests.conftest import TINY_OPTIONS, tiny_vit
from tests.lab.evaluation.trees import write_tree
from tests.methods.making import check_inference_mode, check_prediction, check_reset, check_state
from tests.records import json_of, record_of, rows_of
from tests.runs.tiny import adapt_tiny

EXAMPLE = Path(__file__).parent.parent / "examples" / "plugin"
NAME = "tent-diverse"


def install(site: Path, package: str, points: Mapping[str, str], group: str = "remtta.methods") -> None:
    """Install a package with these entry points, as pip leaves it."""
    folder = site / f"{package.replace('-', '_')}-1.0.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\nSummary: In a line\n")
    (folder / "entry_points.txt").write_text("\n".join([f"[{group}]", *map(" = ".join, points.items())]))


def install_example(point: str, site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    monkeypatch.syspath_prepend(EXAMPLE)
    install(site, project["name"], project["entry-points"][f"remtta.{point}"], f"remtta.{point}")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of packages that Python finds."""
    monkeypatch.syspath_prepend(tmp_path / "site")
    return tmp_path / "site"


@pytest.fixture
def example(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example is installed."""
    install_example("methods", site, monkeypatch)
    found, refused = find_methods(METHOD_TABLE)
    assert (list(found), refused) == ([NAME], {})
    monkeypatch.setitem(METHOD_TABLE, NAME, found[NAME])
    monkeypatch.setitem(STREAM_METHODS, NAME, found[NAME].summary)


def test_a_package_s_methods_are_listed_without_importing_it(example: None, site: Path) -> None:
    code = (
        "import sys; from remtta.cli.application import app; app(['methods'], standalone_mode=False); "
        "app(['adapt', '--help'], standalone_mode=False); print(sys.modules.keys() & {'torch', 'remtta_tent_diverse'})"
    )
    path = os.pathsep.join(map(str, (site, EXAMPLE, EXAMPLE.parent.parent)))
    env = {**os.environ, "PYTHONPATH": path, "TERMINAL_WIDTH": "200"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    assert f"{NAME:<13}  In a line (package remtta-tent-diverse)\n" in done.stdout
    assert f"tpt, {NAME};" in " ".join(done.stdout.replace("│", " ").split())
    assert done.stdout.endswith("set()\n")


@pytest.mark.parametrize("check", [check_state, check_prediction, check_reset, check_inference_mode])
def test_what_holds_for_the_built_in_methods_holds_for_it(check: Callable[[str], None], example: None) -> None:
    check(NAME)


def test_a_package_whose_entry_points_cannot_be_read_is_left_out(site: Path) -> None:
    (site / "other-1.0.dist-info" / "entry_points.txt").mkdir(parents=True)
    install(site, "plugin", {"mine": "plugin:Method"})
    assert "mine" in find_methods(METHOD_TABLE)[0]


def test_its_settings_are_checked_as_others_are(example: None, capfd: pytest.CaptureFixture[str]) -> None:
    config = method_config(NAME, {}, batch_size=16)
    assert (config.lr, config.anchor) == (1e-3 / 4, 0.01)  # Tent's, in proportion to the batch; its preset's
    with pytest.raises(UsageError, match="diversity must be > 0"):
        method_config(NAME, {"diversity": 0}, batch_size=16)
    with pytest.raises(UsageError, match='unknown setting of tent-diverse "micro_batch"; choose lr, '):
        method_config(NAME, {"micro_batch": 4}, batch_size=16)
    assert remtta_here("methods", NAME) == 0
    told = capfd.readouterr().out
    assert told.startswith(f"{NAME}: In a line (package remtta-tent-diverse)\nguard rollback, answer both\n")
    assert "  anchor = 0.01\n" in told
    assert "  diversity = 1.0\n      Weight of the entropy of the mean prediction.\n" in told


def test_a_run_and_an_evaluation_take_it(
    example: None, frames: Path, checkpoint: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model: list[str | Path] = [*TINY_OPTIONS, "--checkpoint", checkpoint, "-b", "2"]
    run = (frames, *model, "--method", NAME, "--set", "diversity=2", "--output", tmp_path / "run")
    assert remtta_here("adapt", *run) == 0, capfd.readouterr().err
    record = json_of(tmp_path / "run" / "run.json")
    assert (record["method"]["diversity"], record["counts"]["updates"]) == (2.0, 6)
    guard = record["options"]["guard"]
    assert (guard["action"], guard["answer"]) == ("rollback", "both")
    tree = write_tree(tmp_path / "c", domains=["fog"], each=1)
    table = f"--methods source,{NAME},more={NAME} --set more.diversity=3 --output {tmp_path / 'out'}".split()
    assert remtta_here("eval", tree, *model, *table, "--no-plots") == 0, capfd.readouterr().err
    assert capfd.readouterr().out.splitlines()[0].split() == ["error", "in", "%", "source", NAME, f"more={NAME}"]
    with mock.patch.object(METHOD_TABLE[NAME].method, "loss", lambda self, images, _: (self.logits(images), 0, 0)):
        assert refusal_of(capfd, "adapt", *run, "--overwrite").endswith(
            "logits of shape (L, 2, 7), got a tensor of shape (2, 7)"
        )


def test_a_variant_of_rem_runs_as_rem_does_or_by_its_preset(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(site, "my-variants", {name.lower(): f"my_variants:{name}" for name in ("Plain", "Bold", "Warned")})
    (site / "my_variants.py").write_text(
        "from remtta.methods.rem import REM\n"
        "from remtta.methods.settings.base import REMTTA, Preset\n"
        "class Plain(REM): ...\n"
        "class Bold(REM): preset = REMTTA\n"
        "class Warned(REM): preset = Preset({'lr': 0.02}, action='warn')\n"
    )
    for name, named in find_methods(METHOD_TABLE)[0].items():
        monkeypatch.setitem(METHOD_TABLE, name, named)
    of_rem = {"mask_ratios": (0.0, 0.1, 0.2), "ranking_weight": 1.0, "margin": 0.0, "adapt_layers": "auto"}
    for variant, name, own in (("plain", "rem", {}), ("bold", "remtta", of_rem)):
        for settings in ({}, {"lr": 0.1}, {"optimizer": "sgd"}):
            config = method_config(variant, settings, batch_size=10)
            assert config == method_config(name, {**own, **settings}, batch_size=10)
        assert AdaptationConfig(variant).with_guard().options == AdaptationConfig(name).with_guard().options
    assert method_config("warned", {}, batch_size=10).lr == 0.01  # half of it, as for `remtta`
    names = ("warned", "warned+guard", "bold", "plain", "plain+guard+both")
    rows = [(row.action(None), row.answer) for row in map(MethodVariant.parse, names)]
    of_preset, added = [("warn", "adapted"), ("warn", "adapted"), ("rollback", "both")], ("rollback", "both")
    assert rows == [*of_preset, ("off", "adapted"), added]


@pytest.mark.parametrize(
    ("module", "point", "told"),
    [
        ("import nothing_of_the_kind", "broken:Method", "ModuleNotFoundError: No module named 'nothing_of_the_kind'"),
        ("", "broken:Method", "AttributeError: module 'broken' has no attribute 'Method'"),
        ("class Method: pass", "broken:Method", "broken:Method of the package my-broken is not a method: "),
        (
            "from remtta.methods.tent import *\n"
            "class Config(TentConfig): x: int = 1\n"
            "class Method(Tent): settings = Config",
            "broken:Method",
            "has settings without @dataclass(frozen=True): Config",
        ),
        (
            "from remtta.methods.tent import *\nclass Method(Tent): preset = {'lr': 1}",
            "broken:Method",
            "has a preset that is no remtta.methods.settings.base.Preset: {'lr': 1}",
        ),
        ("from remtta.methods.base import Method", "broken:Method", "defines no loss(images, center)"),
    ],
)
def test_a_package_that_fails_is_named_in_a_line(
    module: str, point: str, told: str, site: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    install(site, "my-broken", {"broken": point})
    (site / "broken.py").write_text(module)
    found, _ = find_methods(METHOD_TABLE)
    monkeypatch.delitem(sys.modules, "broken", raising=False)
    monkeypatch.setitem(METHOD_TABLE, "broken", found["broken"])
    error = refusal_of(capfd, "methods", "broken")
    assert told in error and "the package my-broken" in error


def test_a_name_that_is_taken_is_refused_when_it_is_used(
    site: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    install(site, "one", {"tent": "one:Tent", "mine": "one:Mine", "a+b": "one:Both"})
    install(site, "two", {"mine": "two:Mine"})
    found, refused = find_methods(METHOD_TABLE)
    assert (list(found), list(refused)) == (["mine"], ["a+b", "mine", "tent"])
    for name, why in refused.items():
        monkeypatch.setitem(REFUSED, name, why)
    told = "Error: remtta itself and the package one both have a method tent; uninstall one"
    assert refusal_of(capfd, "adapt", site, "--method", "tent") == told
    assert refusal_of(capfd, "eval", site, "--methods", "rem,tent+guard") == told
    assert remtta_here("methods") == 0
    assert told.replace("Error", "Warning") in capfd.readouterr().err
    with pytest.raises(UsageError, match="the package one and the package two both have a method mine; uninstall two"):
        method_config("mine", {}, batch_size=16)
    assert refused["a+b"] == "the package one has a method a+b, whose name may only have letters, digits, - and _"


def test_a_package_has_backbones_for_its_own_models(
    site: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install(site, "my-vits", {"vits": "my_vits:FAMILIES"}, "remtta.backbones")
    (site / "my_vits.py").write_text(
        "from torch import nn\n"
        "from timm.models.vision_transformer import VisionTransformer\n"
        "from remtta.backbones.any_classifier import AnyClassifier\n"
        "from remtta.backbones.vit import ViT\n"
        "from remtta.models.unwrapping import UnwrappedModel\n"
        "class MyModel(VisionTransformer): ...\n"
        "class MyViT(ViT): ...\n"
        "class MyNet(nn.Sequential): ...\n"
        "class MyBackbone(AnyClassifier):\n"
        "    def __init__(self, module): super().__init__(UnwrappedModel(module, module))\n"
        "FAMILIES = {MyModel: MyViT, MyNet: MyBackbone}\n"
    )
    found = families.find_families()
    monkeypatch.setattr(families, "FAMILIES", {**found, **families.FAMILIES})
    (kind, net), (backbone, of_net) = found, found.values()
    layers = nn.Conv2d(3, 8, 4, 4), nn.GroupNorm(2, 8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)
    assert type(backbone_of(net(*layers))) is of_net
    model = tiny_vit()
    assert type(backbone_of(model)).__name__ == "ViT"
    model.__class__ = kind
    assert type(backbone_of(model)) is backbone
    found = families.find_families()
    assert not found and "my_vits:FAMILIES of the package my-vits has a second backbone for My" in caplog.text
    install(site, "no-vits", {"none": "my_vits:MyViT", "gone": "my_vits:Gone"}, "remtta.backbones")
    monkeypatch.setattr(families, "FAMILIES", {})
    assert families.find_families().keys() == {kind, net}  # and others work
    assert "my_vits:MyViT of the package no-vits is not a mapping" in caplog.text
    assert "my_vits:Gone of the package no-vits cannot be imported" in caplog.text


def of_an_installed_package(*args: str | Path) -> int:
    """The exit code of a command, also of packages that this process has installed since it began."""
    find_callbacks.cache_clear()
    app = typer.Typer(cls=Application)
    add_commands(app)
    with pytest.raises(SystemExit) as exit_:
        typer.main.get_command(app).main([str(arg) for arg in args])
    find_callbacks.cache_clear()
    return int(exit_.value.code or 0)


def test_a_package_s_command_works_as_the_built_in_ones_do(
    site: Path, frames: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    install_example("commands", site, monkeypatch)
    adapt_tiny(frames, tmp_path / "run", "source")
    capfd.readouterr()
    assert of_an_installed_package("classes", tmp_path / "run", "--json") == 0
    assert sum(json.loads(capfd.readouterr().out).values()) == record_of(tmp_path / "run")["counts"]["frames"]
    assert of_an_installed_package("classes", tmp_path / "run", "--most", "1") == 0
    assert len(capfd.readouterr().out.splitlines()) == 1
    assert of_an_installed_package("--help") == 0
    assert "Count the classes that a run predicted" in capfd.readouterr().out
    for args, code, told in (
        (("--most", "0"), 2, "--most"),
        ((tmp_path / "nowhere",), 1, "nowhere/predictions.jsonl: No such file or directory"),
    ):
        assert of_an_installed_package("classes", *args) == code
        error = capfd.readouterr().err
        assert error.startswith("Error: ") and told in error


@pytest.mark.parametrize(
    ("module", "point", "told"),
    [
        ("import nothing_of_the_kind", "mine", "cannot be imported (ModuleNotFoundError: "),
        ("command = 3", "mine", "bad_command:command of the package bad is not a command (TypeError: "),
        ("def command(): ...", "adapt", "remtta itself and the package bad both have a command adapt; uninstall bad"),
        ("def command(): ...", "eval", "remtta itself and the package bad both have a command eval; uninstall bad"),
    ],
)
def test_a_command_that_cannot_be_used_is_left_out_with_a_warning(
    module: str, point: str, told: str, site: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    install(site, "bad", {point: "bad_command:command"}, "remtta.commands")
    (site / "bad_command.py").write_text(module)
    monkeypatch.delitem(sys.modules, "bad_command", raising=False)
    assert of_an_installed_package("methods") == 0
    (warning,) = capfd.readouterr().err.splitlines()
    assert warning.startswith("Warning: ") and told in warning


def test_a_package_s_callback_brings_its_options(
    site: Path, frames: Path, tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    install_example("callbacks", site, monkeypatch)
    assert of_an_installed_package("adapt", "--help-all") == 0
    assert "--unsure-below" in capfd.readouterr().out
    run: list[str | Path] = [frames, *tiny, "-o", tmp_path / "run", "--overwrite"]
    folder = tmp_path / "unsure" / "frames"
    assert of_an_installed_package("adapt", *run) == 0
    middle = sorted(row["prob"] for row in rows_of(tmp_path / "run"))[6]
    assert of_an_installed_package("adapt", *run, "--unsure", folder, "--unsure-below", str(middle)) == 0
    unsure = {row["index"] for row in rows_of(tmp_path / "run") if row["prob"] < middle}
    assert {int(path.stem) for path in folder.iterdir()} == unsure and len(unsure) == 6
    with Image.open(folder / f"{min(unsure)}.png") as image:
        assert image.size == (32, 32)
    capfd.readouterr()
    (tmp_path / "file").touch()
    assert of_an_installed_package("adapt", *run, "--unsure", tmp_path / "file" / "x") == 2
    assert "file is a file, so" in capfd.readouterr().err
    assert len(rows_of(tmp_path / "run")) == 12
    assert refusal_of(capfd, "adapt", *run, "--unsure", folder).startswith("Error: No such option: --unsure")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("import nothing_of_the_kind", "cannot be imported (ModuleNotFoundError: "),
        ("class Mine: options = int", "is not a callback (TypeError: it must be a subclass of remtta.Callback whose"),
        ("class Mine(Callback): pass", "is not a callback (TypeError: it must be a subclass of remtta.Callback whose"),
        (
            "@dataclass\nclass Options:\n    x: Annotated[str | None, output_option('Mine.', flags=('-b',))] = None\n"
            "class Mine(Callback): options = Options",
            "bad_callback:Mine of the package bad has options that exist already: -b; uninstall it",
        ),
        (
            "@dataclass\nclass Options:\n    health: Annotated[str | None, output_option('Mine.')] = None\n"
            "class Mine(Callback): options = Options",
            "bad_callback:Mine of the package bad has options that exist already: health; uninstall it",
        ),
        (
            "@dataclass\nclass Options:\n    mine: 'Nothing' = None\nclass Mine(Callback): options = Options",
            "is not a callback (NameError: name 'Nothing' is not defined); uninstall it",
        ),
    ],
)
def test_a_callback_that_cannot_be_used_is_left_out_with_a_warning(
    text: str, told: str, site: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    install(site, "bad", {"mine": "bad_callback:Mine"}, "remtta.callbacks")
    imports = "from dataclasses import dataclass", "from typing import Annotated", "from remtta import Callback"
    option = "from remtta.options.option import output_option"
    (site / "bad_callback.py").write_text("\n".join([*imports, option, text]))
    monkeypatch.delitem(sys.modules, "bad_callback", raising=False)
    assert of_an_installed_package("adapt", "--help") == 0
    (warning,) = capfd.readouterr().err.splitlines()
    assert warning.startswith("Warning: ") and told in warning
