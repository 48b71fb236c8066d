"""`remtta models`: list the models that can be adapted, what each supports, and why not."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from remtta.cli.reporting import command
from remtta.cli.running import PrintOptions
from remtta.errors import UsageError
from remtta.methods.settings import ZERO_SHOT

if TYPE_CHECKING:
    from remtta.methods.support import Support

_WIDTH = 100
_MAX_NAMED = 3


def models(
    printed: PrintOptions,
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="A timm model, or part of a listed name; by default all.")
    ] = None,
) -> None:
    """List the families of models that can be adapted, and the methods for each; or check one model.

    For one model, also explains why methods are refused. Downloads nothing.

    Examples:

      remtta models

      remtta models siglip

      remtta models vit_base_patch16_dinov3 --json
    """
    with command():
        import timm

        from remtta.methods.support import kinds, support_of

        known, part = kinds(), (name or "").lower()
        one = next((model for model in timm.list_models() if model == (name or "").partition(".")[0]), None)
        chosen = [one] if one else [model for model, kind in known.items() if part in f"{model} {kind}".lower()]
        if not chosen:
            like = ", ".join([model for model in timm.list_models() if part in model][:_MAX_NAMED])
            if not like:
                raise UsageError(f'no timm model or listed family has "{part}" in its name; see remtta models')
            raise UsageError(f'no listed family has "{part}" in its name; name one model, such as {like}')
        found = [support_of(model, known.get(model)) for model in chosen]
        content = [{**asdict(each), "adapts": each.adapts, "methods": each.methods} for each in found]
        printed.show(content, lambda: whole_text(found[0]) if one else _list_text(found, whole=name is None))


def _list_text(found: Sequence[Support], *, whole: bool) -> str:
    from remtta.backbones.families import modules_without_family

    lines = list(map(short_text, found))
    if whole:
        others = ", ".join(modules_without_family())
        lines.append(_filled(f"timm's other modules, adapted like any classifier (docs/models.md): {others}"))
    return "\n".join([*lines, "remtta models NAME shows which methods a timm model does not support, and why."])


def short_text(support: Support) -> str:
    """Return two lines on a model: its kind, and what it supports."""
    facts = [f"masks by {' or '.join(support.masks)}", support.adapts, methods_text(support)]
    if not support.has_head:
        facts.append("timm has no head for it")
    return f"{support.model}: {support.kind}\n    {'; '.join(facts)}"


def methods_text(support: Support) -> str:
    """Return the supported methods, in a few words."""
    fewer = len(support.refused) < len(support.methods)
    refused = [method for method in support.refused if method not in ZERO_SHOT]
    return (
        f"all methods but {', '.join([*refused, 'zero-shot ones'])}" if fewer else f"only {', '.join(support.methods)}"
    )


def whole_text(support: Support) -> str:
    """Return all information on one model."""
    lines = [f"{support.model}: {support.kind}"]
    if not support.has_head:
        lines.append("head: none in timm; give your weights with --checkpoint and --num-classes")
    lines += rem_lines(support.masks, support.adapts, support.num_adapted)
    lines.append(f"methods: {', '.join(support.methods)}")
    reasons = dict.fromkeys(support.refused.values())
    for reason in reasons:
        refused = [method for method, why in support.refused.items() if why == reason]
        alike = len(refused) > len(support.methods)
        lines.append(f"not {'any other' if alike else ', '.join(refused)}: {reason}")
    return "\n".join(map(_filled, lines))


def rem_lines(masks: Sequence[str], adapts: str, weights: int) -> list[str]:
    """Return lines on how REM masks a model, its default first, and which norms it adapts, if there are any."""
    ways = [f"{masks[0]} (default)", *masks[1:], "random"] if masks else ["random"]
    lines = [f"REM masks by: {', '.join(ways)}", f"remtta adapts the norms of: {adapts}, {weights:,} weights"]
    return lines if weights else []


def _filled(text: str) -> str:
    return textwrap.fill(text, _WIDTH, subsequent_indent="    ", break_on_hyphens=False)
