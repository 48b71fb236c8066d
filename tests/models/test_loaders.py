"""Loaders: which one takes a model, its own options, and the loaders of other packages."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from remtta import Adapter, Preprocessing, RunOptions, adapt_stream, load_model
from remtta.errors import CheckpointError, UsageError
from remtta.models.info import model_info
from remtta.options import ModelOptions
from remtta.options.loaders import find_loaders, own_options
from tests.command import remtta_here
from tests.conftest import NUM_CLASSES, random_images, tiny_vit
from tests.records import json_of
from tests.test_extensions import install, of_an_installed_package

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


NET = """
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from remtta.options.loaders import Loader
from remtta.options.option import model_option


@dataclass(frozen=True)
class NetOptions:
    gain: Annotated[float | None, model_option("Factor of the weights.")] = None
    table: Annotated[Path | None, model_option("A file of its own.")] = None


class NetLoader(Loader):
    names = "a file of my library"
    suffixes = (".net",)
    options = NetOptions

    def load(self, options, device, on_texts):
        import torch
        from torch import nn

        number = float(Path(options.checkpoint).read_text()) * (self.own_options(options).gain or 1)
        torch.manual_seed(0)
        layers = nn.Conv2d(3, 8, 3, 2), nn.GroupNorm(2, 8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)
        net = nn.Sequential(*layers).half()
        net[4].bias.data.fill_(number)
        net.pretrained_cfg = {"mean": (0.1, 0.2, 0.3), "input_size": (3, 48, 48), "label_names": list("abcd")}
        return net
"""


@pytest.fixture
def net(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of a library whose loader only builds the module."""
    install(site, "nets", {"net": "nets:NetLoader"}, "remtta.loaders")
    (site / "nets.py").write_text(NET)
    monkeypatch.chdir(tmp_path)
    Path("a.net").write_text("3")
    return Path("a.net")


def test_what_the_user_gives_is_added_to_a_package_s_module(net: Path, frames: Path) -> None:
    plain: Any = load_model("a.net")
    assert not plain.training and {each.dtype for each in plain.parameters()} == {torch.float32}
    info = model_info(plain)
    assert info.labels == list("abcd") and info.preprocessing.mean == (0.1, 0.2, 0.3)
    assert info.preprocessing.input_size == (48, 48)
    given: dict[str, Any] = {
        "labels": list("wxyz"),
        "std": 0.5,
        "input_size": (32, 40),
        "interpolation": "bilinear",
        "crop_pct": 0.9,
    }
    model: Any = load_model("a.net", gain=2.0, table="t.csv", **given)
    assert model[4].bias[0] == 6
    preprocessing = Preprocessing((32, 40), (0.1, 0.2, 0.3), (0.5,) * 3, "bilinear", 0.9)
    assert model_info(model).preprocessing == preprocessing and model_info(model).labels == list("wxyz")
    adapt_stream(model, frames, "run", options=RunOptions(batch_size=4))
    record = json_of(Path("run", "run.json"))["model"]
    own = {"gain": 2.0, "table": str(Path("t.csv").resolve())}
    assert record.items() >= {"name": "a.net", "checkpoint": str(net.resolve()), "input_size": [32, 40], **own}.items()


def test_the_loader_in_the_documentation_works(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    (example,) = re.findall("```python\n(from remtta.options.loaders import Loader\n.*?)```", page, re.DOTALL)
    install(site, "documented", {"nets": "my_nets_loader:NetLoader"}, "remtta.loaders")
    (site / "my_nets_loader.py").write_text(example)
    (site / "my_nets.py").write_text("from tests.conftest import tiny_vit\nread_net = lambda path: tiny_vit()")
    monkeypatch.chdir(tmp_path)
    Path("a.net").touch()
    labels = list(map(str, range(NUM_CLASSES)))
    info = model_info(load_model("a.net", labels=labels, std=0.5))
    assert (info.labels, info.preprocessing.mean, info.preprocessing.std) == (labels, (0.5,) * 3, (0.5,) * 3)


@pytest.mark.parametrize(
    ("name", "given", "told"),
    [
        ("a.net", {"num_classes": 3, "model_kwargs": {"a": 1}}, "leave --num-classes and --model-kwargs out"),
        ("a.net", {"use_ema": True}, "leave --use-ema out"),
        ("a.net", {"labels": list("abc")}, "got 3 labels for a model with 4 classes"),
        ("a.net", {"input_size": 2}, "a.net takes no images of 2 x 2 pixels"),
        ("b.net", {}, "b.net: no such model file"),
    ],
)
def test_what_does_not_fit_a_package_s_module_is_refused(
    name: str, given: dict[str, Any], told: str, net: Path
) -> None:
    with pytest.raises(UsageError, match=told):
        load_model(name, **given)


def test_a_loader_s_missing_or_unreadable_file_is_one_line(net: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(self: object, options: ModelOptions, device: object, on_texts: object) -> Any:
        return Path(str(options.name).partition(":")[2]).read_text()

    loader = find_loaders()["net"]
    monkeypatch.setattr(type(loader), "load", load)
    monkeypatch.setattr(type(loader), "matches", lambda self, options: options.name.startswith("net:"))
    with pytest.raises(UsageError, match=r"net:gone cannot be loaded: .*No such file or directory: 'gone'"):
        load_model("net:gone")
    with pytest.raises(CheckpointError, match=r"net:\. cannot be loaded: .*[Dd]irectory"):
        load_model("net:.")


def test_labels_reach_the_classifier_in_a_loader_s_wrapper(net: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Halved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = tiny_vit()

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return self.inner(images / 2)

    monkeypatch.setattr(type(find_loaders()["net"]), "load", lambda *given: Halved())
    labels = [f"class {number}" for number in range(NUM_CLASSES)]
    assert model_info(load_model("a.net", labels=labels)).labels == labels
    with pytest.raises(UsageError, match="normalises images itself; leave --mean and --std out"):
        load_model("a.net", mean=0.5)


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ("labels", "bad_loader:Mine of the package bad has options that exist already: labels; uninstall it"),
        ("provider", "bad_loader:Mine of the package bad has options that exist already: provider; uninstall it"),
        ("limit", "the loader mine has options that exist already: --limit; uninstall its package"),  # of adapt
        ("severity", "the loader mine has options that exist already: --severity; uninstall its package"),  # of eval
        ("health", "the loader mine has options that exist already: --health; uninstall its package"),  # a callback's
    ],
)
def test_a_loader_with_an_option_that_exists_is_left_out_with_a_warning(
    option: str, told: str, site: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    install(site, "bad", {"mine": "bad_loader:Mine"}, "remtta.loaders")
    text = MODULE.replace("    classes: ", f"    {option}: ").replace("TinyLoader", "Mine")
    (site / "bad_loader.py").write_text(text)
    monkeypatch.delitem(sys.modules, "bad_loader", raising=False)
    assert of_an_installed_package("methods") == 0
    (warning,) = capfd.readouterr().err.splitlines()
    assert warning == f"Warning: {told}"
    assert "mine" not in find_loaders() and list(find_loaders())[-1] == "timm"


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
        ("TinyLoader = 3", "is not a remtta.options.loaders.Loader; uninstall it"),
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


def test_apply_tells_of_no_checkpoint_to_a_loader_that_takes_none(
    frames: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "adapted.safetensors"
    monkeypatch.setattr(type(find_loaders()["demo"]), "takes", ())
    assert remtta_here("adapt", frames, "--model", "remtta-demo", "-o", tmp_path / "run") == 0
    assert remtta_here("apply", tmp_path / "run", "-o", target) == 0
    line = capfd.readouterr().err.splitlines()[-1]
    assert line.startswith(f"{target}: remtta-demo with ") and "--checkpoint" not in line
