"""Zero-shot classifiers from vision-language models, and the methods for them. Imports no torch."""

from __future__ import annotations

from remtta.methods.settings.core import MethodSpec

METHODS: dict[str, MethodSpec] = {
    "watt": MethodSpec(
        "remtta.zero_shot.watt:WATT",
        "zero-shot: adapt per template, average the weights (Osowiechi et al., NeurIPS 2024)",
        zero_shot=True,
    ),
    "rem-watt": MethodSpec("remtta.zero_shot.watt:REMWATT", "zero-shot: WATT with REM's loss", zero_shot=True),
    "clipartt": MethodSpec(
        "remtta.zero_shot.watt:CLIPArTT",
        "zero-shot: train towards sentences of likely classes (Vargas Hakim et al., WACV 2025)",
        zero_shot=True,
    ),
    "tpt": MethodSpec(
        "remtta.zero_shot.tpt:TPT",
        "zero-shot: tune the prompt on views of each image (Shu et al., NeurIPS 2022)",
        zero_shot=True,
    ),
}
"""Methods by name, which accept only zero-shot models."""
