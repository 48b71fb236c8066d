"""Load the classifier in an ONNX file, with the preprocessing and labels that its metadata holds."""

from __future__ import annotations

import json
import logging
import math
from ast import literal_eval
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from remtta.errors import CheckpointError, UsageError, first_line, needed
from remtta.formats.loaders import OnnxOptions, config_in
from remtta.formats.onnx_graph import OnnxGraph, read_graph
from remtta.formats.onnx_model import CPU, MAX_PIXELS, OnnxClassifier
from remtta.formats.transformers_processors import PREPROCESSOR, are_placeholders, image_settings, labels_in
from remtta.models import imagenet
from remtta.models.metadata import PretrainedConfig
from remtta.models.preprocessing import Preprocessing
from remtta.options import ModelOptions

ADAPTIVE = "adaptive"
"""Key in the metadata of a file that adapts itself, with the names of the numbers in its status."""

_PROVIDERS = {"cpu": "CPU", "cuda": "CUDA", "mps": "CoreML"}
_MAX_NAMES = 2**21  # characters of Ultralytics's class names: Python takes a hundred times as many bytes to parse them
_OTHER_TASKS = ("detect", "segment", "pose", "obb")  # of Ultralytics

_log = logging.getLogger(__name__)


def load_onnx(
    options: ModelOptions, own: OnnxOptions, device: str | torch.device, *, to_check: bool = False
) -> OnnxClassifier:
    """Load the classifier in an ONNX file. Raise UsageError if a package is missing, or a value does not fit;
    CheckpointError if the file is damaged, or holds no classifier of images.
    """
    providers = _providers(str(device), own.provider)
    graph, kind = read_graph(Path(str(options.checkpoint))), OnnxClassifier
    if ADAPTIVE in graph.metadata:
        if not to_check:
            raise CheckpointError(f"{graph.path} adapts itself: run it as it is, or name the file that it was made of")
        from remtta.formats.adaptive.diagnosis import AdaptiveFile as kind
    config = _known_config(graph)
    stored = {"usual": config["input_size"][1:]} if "input_size" in config else {}
    size = None if options.input_size is None else (options.input_size[0], options.input_size[1])  # JSON has lists
    model = kind(graph, own.output_name, providers, size, **stored)
    if model.provider != providers[0][0]:
        raise UsageError(f"onnxruntime cannot use {providers[0][0]} on this machine; use --provider cpu")
    if stored and options.input_size is None and stored["usual"] != model.image_size:
        raise _damaged(graph, f"images of {stored['usual']} pixels, and it takes {model.image_size}")
    names = config.get("label_names")
    if not names and options.labels is None and imagenet.names_of(model.num_classes):
        _log.info("%s has no class names; using ImageNet's %d", model.path.name, model.num_classes)
    if names and options.labels is None and len(names) != model.num_classes:
        raise _damaged(graph, f"{len(names)} names of {model.num_classes} classes")
    if model.returns_probabilities:
        _log.info("%s returns probabilities; their logarithms are the logits", model.path.name)
    if model.doubt:
        _log.warning("%s returns %s; remtta takes them as logits: export it without that", model.path.name, model.doubt)
    if stored or not model.assumes_size:
        config["input_size"] = (3, *model.image_size)
    if model.normalises:
        unit = {"mean": (0.0,) * 3, "std": (1.0,) * 3}
        if any(tuple(getattr(options, name) or values) != values for name, values in unit.items()):
            raise UsageError(f"{model.path.name} takes pixels, and normalises them itself; leave --mean and --std out")
        config |= {"crop_pct": 1.0, **unit}
    path = str(graph.path.absolute())  # not what a link leads to, beside which there may be no weights
    machine = {"provider": None} if own.provider else {}  # which another machine may not have
    model.pretrained_cfg = {**config, "built_from": {"checkpoint": path, **machine}}
    return model


def _damaged(graph: OnnxGraph, problem: object) -> CheckpointError:
    return CheckpointError(f"{graph.path} has damaged metadata: {problem}; export it again")


def _providers(device: str, name: str | None) -> list[Any]:
    """Return the execution providers to try, by preference; raise UsageError if one is not available."""
    available = needed("onnxruntime", "onnx", "an ONNX file").get_available_providers()
    short = {each.removesuffix("ExecutionProvider").lower(): each for each in available}
    kind, _, number = device.partition(":")
    wanted = name or ("CUDA" if kind == "auto" and "cuda" in short else _PROVIDERS.get(kind, "CPU"))
    found = short.get(wanted.lower().removesuffix("executionprovider"))
    if found is None:
        raise UsageError(f"onnxruntime has no provider {wanted} here; it has {', '.join(sorted(short))}")
    first = (found, {"device_id": number} if number else {})
    return [first] if found == CPU else [first, CPU]


def _known_config(graph: OnnxGraph) -> PretrainedConfig:
    """Return the preprocessing and labels that the file holds, if remtta or Ultralytics wrote it; else those in files
    of transformers beside it, as Optimum writes them.
    """
    known = graph.metadata
    if known.get("task") in _OTHER_TASKS:
        raise CheckpointError(f"{graph.path} is a model to {known['task']}, not a classifier of images")
    try:
        if "remtta_version" in known:
            return _config(json.loads(known["preprocessing"]), json.loads(known["labels"]))
        if known.get("task") == "classify" and "names" in known:  # Ultralytics
            if len(known["names"]) > _MAX_NAMES:
                raise ValueError(f"{len(known['names']):,} characters of class names")
            names, size = dict(literal_eval(known["names"])), literal_eval(known.get("imgsz", "None"))
            values = {"mean": (0.0,) * 3, "std": (1.0,) * 3, "interpolation": "bilinear", "crop_pct": 1.0}
            return _config({**values, "input_size": size}, [names[number] for number in range(len(names))])
    except (ValueError, TypeError, LookupError, SyntaxError, RecursionError, MemoryError) as error:
        raise _damaged(graph, first_line(error)) from error
    folder = graph.path.parent
    if not (folder / PREPROCESSOR).is_file():
        return {}
    try:
        config = dict(image_settings(folder, "", (1, 1)))
        if saved := config_in(folder):
            labels = labels_in(folder / "config.json", saved)
            config["label_names"] = None if are_placeholders(labels) else labels
    except CheckpointError as error:  # the model itself may be usable
        _log.warning("%s", error)
        return {}
    return config


def _config(preprocessing: Mapping[str, Any], labels: object) -> PretrainedConfig:
    """Return preprocessing and labels in the form of timm's configs; raise ValueError, TypeError or KeyError if one is
    not valid. The input size may be None.
    """
    size = preprocessing["input_size"]
    values = vars(Preprocessing(**{**preprocessing, "input_size": (1, 1) if size is None else tuple(size)}))
    if not isinstance(labels, list):
        raise TypeError(f"labels {labels!r:.80}")
    config = {**values, "label_names": [str(label) for label in labels], "input_size": (3, *values["input_size"])}
    if 2 * math.prod(values["input_size"]) > MAX_PIXELS:
        raise ValueError(f"images of {size[0]} x {size[1]}")
    return config if size else {name: value for name, value in config.items() if name != "input_size"}
