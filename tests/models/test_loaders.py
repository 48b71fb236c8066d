"""Loaders: which one takes a model, its own options, and the loaders of other packages."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from remtta import Adapter, load_model
from remtta.errors import UsageError
from remtta.options import ModelOptions
from remtta.options.loaders import find_loaders, own_options
from tests.conftest import random_images
from tests.test_extensions import install

MODULE = '''
from dataclasses import dataclass
from typing import Annotated

from remtta.options.loaders import Loader
from remtta.options.option import model_option


@dataclass(frozen=True)
class TinyOptions:
    classes: Annotated[int | None, model_option("Number of classes of a tiny model.", min=2, default="7")] = None


class TinyLoader(Loader):
    """Models with random weights."""

    names = "tiny:NAME"
    options = TinyOptions
    default_method = "source"

    def matches(self, options):
        return (options.name or "").startswith("tiny:")

    def load(self, options, device, on_texts):
        from timm import create_model

        own = self.own_options(options)
        size = {"img_size": 32, "patch_size": 4, "embed_dim": 48, "depth": 2, "num_heads": 3}
        return create_model(options.name.removeprefix("tiny:"), num_classes=own.classes or 7, **size).eval()
'''


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of packages that Python finds, whose loaders are found anew."""
    monkeypatch.syspath_prepend(tmp_path / "site")
    for found in (find_loaders, own_options):
        found.cache_clear()
    yield tmp_path / "site"
    monkeypatch.undo()
    for found in (find_loaders, own_options):
        found.cache_clear()


@pytest.fixture
def tiny(site: Path) -> None:
    """A package with a loader is installed."""
    install(site, "tiny-models", {"tiny": "tiny_models:TinyLoader"}, "remtta.loaders")
    (site / "tiny_models.py").write_text(MODULE)


def test_a_package_s_loader_loads_and_its_options_are_checked(tiny: None) -> None:
    model: Any = load_model("tiny:vit_tiny_patch16_224", classes=3)
    assert model.num_classes == 3
    adapter = Adapter(model, batch_size=2)
    assert adapter(random_images(2)).shape == (2, 3)
    assert ModelOptions("tiny:x").loader.default_method == "source"
    with pytest.raises(UsageError, match="--classes: only for tiny:NAME, and the model is vit_tiny_patch16_224"):
        load_model("vit_tiny_patch16_224", classes=3)
    with pytest.raises(TypeError, match="a model has no option klasses"):
        load_model("tiny:vit_tiny_patch16_224", klasses=3)


def test_commands_offer_its_names_and_options_without_torch(tiny: None, site: Path) -> None:
    code = (
        "import sys; from remtta.cli.application import app; app(['adapt', '--help-all'], standalone_mode=False); "
        "print(sys.modules.keys() & {'torch', 'timm'})"
    )
    path = os.pathsep.join(map(str, (site, Path(__file__).parents[2])))
    env = {**os.environ, "PYTHONPATH": path, "TERMINAL_WIDTH": "200"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    shown = " ".join(done.stdout.replace("│", " ").split())
    assert "tiny:NAME" in shown and "--classes" in shown and "Number of classes of a tiny model." in shown
    assert done.stdout.endswith("set()\n")


@pytest.mark.parametrize(
    ("module", "told"),
    [
        ("import nothing_of_the_kind", "ModuleNotFoundError: No module named 'nothing_of_the_kind'"),
        ("TinyLoader = 3", "is not a subclass of remtta.options.loaders.Loader"),
    ],
)
def test_a_broken_one_is_reported_and_others_work(
    module: str, told: str, site: Path, caplog: pytest.LogCaptureFixture
) -> None:
    install(site, "bad-models", {"tiny": "bad_models:TinyLoader", "onnx": "bad_models:Other"}, "remtta.loaders")
    (site / "bad_models.py").write_text(module)
    assert "tiny" not in find_loaders() and list(find_loaders())[-1] == "timm"
    assert told in caplog.text and "both have a loader onnx; uninstall bad-models" in caplog.text
    assert ModelOptions("x.onnx").loader is find_loaders()["onnx"]


def test_without_a_part_the_error_names_it(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("remtta.extensions.PARTS", ("formats", "lab"))
    monkeypatch.setattr("remtta.extensions.has_part", lambda part: part != "formats")
    with pytest.raises(UsageError, match=r'unknown model "x.onnx"; .*; not installed: the loaders onnx \(remtta.form'):
        load_model("x.onnx")
    with pytest.raises(TypeError, match="no option provider"):
        load_model("x.onnx", provider="cpu")


@pytest.mark.parametrize("name", ["x.onnx", "clip:ViT-B-16/openai"])
def test_a_missing_package_is_named_before_torch_is_loaded(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "x.onnx").touch()
    monkeypatch.chdir(tmp_path)
    find_loaders()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=f"{name} needs .*, which is not installed: pip install"):
        ModelOptions(name).check()
