"""Prompt templates for the class names of zero-shot models. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from remtta.errors import UsageError
from remtta.files import read_text

CLIP = "clip:"
"""Prefix of a zero-shot model's name."""

PLACE = "{}"
"""Placeholder for the class name."""

DEFAULT_PROMPTS = "single"
"""The default templates."""

_PHOTOS = (
    *("bad", "low resolution", "cropped", "bright", "dark", "close-up", "black and white", "pixelated"),
    *("jpeg corrupted", "blurry", "good"),
)
_OBJECTS = ("hard to see", "clean", "dirty", "cool", "large", "nice", "weird", "small")
_WORKS = ("a sculpture", "a rendering", "a tattoo", "a drawing", "a painting", "a doodle", "a sketch", "a rendition")
_MATERIALS = ("embroidered", "plastic", "origami", "toy", "cartoon", "plushie")

_OPENAI_80 = (
    *(f"a photo of {article} {{}}." for article in ("a", "the", "many", "my", "one")),
    *(f"itap of {article} {{}}." for article in ("a", "the", "my")),
    *(f"a {kind} photo of {article} {{}}." for kind in _PHOTOS for article in ("a", "the")),
    *(f"a photo of {article} {kind} {{}}." for kind in _OBJECTS for article in ("a", "the")),
    *(f"{work} of {article} {{}}." for work in (*_WORKS, "graffiti", "art") for article in ("a", "the")),
    *(f"{article} {material} {{}}." for material in _MATERIALS for article in ("a", "the")),
    *(f"{article} {{}} in a video game." for article in ("a", "the")),
)
_OPENAI_7 = (
    "itap of a {}.",
    "a bad photo of the {}.",
    "a origami {}.",
    "a photo of the large {}.",
    "a {} in a video game.",
    "art of the {}.",
    "a photo of the small {}.",
)

TEMPLATES: dict[str, tuple[str, ...]] = {
    "single": ("a photo of a {}.",),
    "openai7": _OPENAI_7,
    "openai80": _OPENAI_80,
    "watt": ("a photo of a {}", "itap of a {}", *_OPENAI_7[1:]),
}
"""Templates by name: CLIP's one, OpenAI's 7 and 80 for ImageNet, and the 8 of WATT's official code."""


def templates_of(prompts: str | Sequence[str]) -> tuple[str, ...]:
    """Return templates by name, from a file with one per line, or as given; raise UsageError if the name or file does
    not exist, or a template does not have exactly one placeholder.
    """
    templates, where = tuple(prompts), "the templates"
    if isinstance(prompts, str):
        if prompts in TEMPLATES:
            return TEMPLATES[prompts]
        if not Path(prompts).is_file():
            raise UsageError(
                f'unknown prompts "{prompts}"; choose {", ".join(TEMPLATES)}, or a file with one template per line'
            )
        lines = map(str.strip, read_text(prompts, "--prompts").splitlines())
        templates, where = tuple(filter(None, lines)), prompts
    wrong = next((f'"{template}"' for template in templates if template.count(PLACE) != 1), "none")
    if wrong != "none" or not templates:
        raise UsageError(f"{where}: a template needs one {PLACE} for the class's name, got {wrong}")
    return templates


def filled(template: str, name: str) -> str:
    """Return the sentence for a class."""
    return template.replace(PLACE, name)
