"""`remtta methods` and `remtta models`: list the methods with their settings, and the models that can be adapted."""

from __future__ import annotations

import dataclasses
import inspect
import logging
import re
import shutil
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from remtta.cli.reporting import command
from remtta.cli.running import PrintOptions
from remtta.errors import UsageError
from remtta.methods.settings.base import MethodConfig
from remtta.methods.table import FULL_BATCH, METHOD_SUMMARIES, METHOD_TABLE, REFUSED, check_method

if TYPE_CHECKING:
    from remtta.methods.support import Support

_WIDTH = 100
_MAX_NAMED = 3
_INDENT = " " * 6

_log = logging.getLogger(__name__)


def methods(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="A method; by default all.",
            autocompletion=lambda incomplete: [
                (name, summary) for name, summary in METHOD_SUMMARIES.items() if name.startswith(incomplete)
            ],
        ),
    ] = None,
) -> None:
    """List the methods, or one method's settings and their defaults.

    To change a setting: --set KEY=VALUE, or --set NAME.KEY=VALUE where a command takes several methods.

    Examples:

      remtta methods

      remtta methods tent
    """
    with command():
        if name is None:
            described = METHOD_SUMMARIES | {method: spec.summary for method, spec in METHOD_TABLE.items()}
            width = max(map(len, described))  # deprecated ones come last
            typer.echo("\n".join(f"{method:<{width}}  {text}" for method, text in described.items()))
            for reason in REFUSED.values():
                _log.warning("%s", reason)
            return
        check_method(name, METHOD_TABLE)
        config, preset = METHOD_TABLE[name].config, METHOD_TABLE[name].preset
        descriptions = _descriptions(config)
        width = min(_WIDTH, shutil.get_terminal_size().columns)
        typer.echo(f"{name}: {METHOD_TABLE[name].summary}\nguard {preset.action}, answer {preset.answer}\n")
        for setting in config.setting_names():
            value = preset.settings.get(setting, getattr(config, setting))
            default = ",".join(f"{part:g}" for part in value) if isinstance(value, tuple) else str(value)
            if setting == "lr" and "lr" in preset.settings:
                default += f" for batches of {FULL_BATCH} or more, proportionally lower for smaller ones"
            elif setting == "lr" and config.lr_batch:
                default += f" at a batch of {config.lr_batch}, proportional to the batch size"
            typer.echo(f"  {setting} = {default}")
            text = descriptions.get(setting, "")
            typer.echo(textwrap.fill(text, width, initial_indent=_INDENT, subsequent_indent=_INDENT))


def _descriptions(config: type[MethodConfig]) -> dict[str, str]:
    """Return the descriptions of a config's settings from its docstring and those of its base classes."""
    texts: dict[str, str] = {}
    for cls in reversed(config.__mro__):
        _, _, section = inspect.cleandoc(cls.__doc__ or "").partition("Attributes:\n")
        entries = re.findall(r"^    (\w+): (.*(?:\n {5,}\S.*)*)", section, re.MULTILINE)
        texts |= {name: " ".join(text.split()) for name, text in entries}
    return texts


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
        from remtta.models.building import current_name

        descriptions, text = kinds(), (name or "").lower()
        architecture = current_name(name or "").partition(".")[0]
        is_model = architecture in timm.list_models()
        names = [model for model, description in descriptions.items() if text in f"{model} {description}".lower()]
        if is_model:
            names = [architecture]
        if not names:
            similar = ", ".join([model for model in timm.list_models() if text in model][:_MAX_NAMED])
            if not similar:
                raise UsageError(f'no timm model or listed family has "{text}" in its name; see remtta models')
            raise UsageError(f'no listed family has "{text}" in its name; name one model, such as {similar}')
        supports = [support_of(model, descriptions.get(model)) for model in names]
        content = [{**dataclasses.asdict(item), "adapts": item.adapts, "methods": item.methods} for item in supports]
        printed.show(
            content, lambda: _model_text(supports[0]) if is_model else _list_text(supports, show_others=name is None)
        )


def _list_text(supports: Sequence[Support], *, show_others: bool) -> str:
    from remtta.backbones.families import modules_without_family

    lines = []
    for support in supports:
        facts = [f"masks by {' or '.join(support.masks)}", support.adapts, methods_text(support)]
        if not support.has_head:
            facts.append("timm has no head for it")
        lines.append(f"{support.model}: {support.kind}\n    {'; '.join(facts)}")
    if show_others:
        others = ", ".join(modules_without_family())
        lines.append(_filled(f"timm's other modules, adapted like any classifier (docs/models.md): {others}"))
    return "\n".join([*lines, "remtta models NAME shows which methods a timm model does not support, and why."])


def methods_text(support: Support) -> str:
    """Return the supported methods, in a few words."""
    if len(support.refused) >= len(support.methods):
        return f"only {', '.join(support.methods)}"
    refused = [method for method in support.refused if not METHOD_TABLE[method].zero_shot]
    if len(refused) < len(support.refused):
        refused.append("zero-shot ones")
    return f"all methods but {', '.join(refused)}" if refused else "all methods"


def _model_text(support: Support) -> str:
    """Return all information on one model."""
    lines = [f"{support.model}: {support.kind}"]
    if not support.has_head:
        lines.append("head: none in timm; give your weights with --checkpoint and --num-classes")
    lines += rem_lines(support.masks, support.adapts, support.num_adapted)
    lines.append(f"methods: {', '.join(support.methods)}")
    for reason in dict.fromkeys(support.refused.values()):
        refused = [method for method, its_reason in support.refused.items() if its_reason == reason]
        most = len(refused) > len(support.methods)
        lines.append(f"not {'any other' if most else ', '.join(refused)}: {reason}")
    return "\n".join(map(_filled, lines))


def rem_lines(masks: Sequence[str], adapts: str, weights: int) -> list[str]:
    """Return lines on how REM masks a model, its default first, and which norms it adapts, if there are any."""
    if not weights:
        return []
    scores = [f"{masks[0]} (default)", *masks[1:], "random"] if masks else ["random"]
    return [f"REM masks by: {', '.join(scores)}", f"remtta adapts the norms of: {adapts}, {weights:,} weights"]


def _filled(text: str) -> str:
    return textwrap.fill(text, _WIDTH, subsequent_indent="    ", break_on_hyphens=False)
