"""`remtta delta ...`: compare deltas, make new ones of them, and keep their versions; `remtta inspect` shows one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from remtta.cli.groups import Only
from remtta.cli.options.running import PrintOptions, RunningOptions
from remtta.cli.options.target import TargetOptions
from remtta.cli.reporting import say
from remtta.errors import DeltaError, without_password
from remtta.runs.reading import printable

_Delta = Annotated[Path, typer.Argument(help="A delta.safetensors of remtta adapt, or its run folder.")]
_Running = Annotated[RunningOptions, Only("quiet", "debug")]


def diff(
    first: _Delta,
    second: _Delta,
    printed: PrintOptions,
    running: Annotated[RunningOptions, Only("debug")],
) -> None:
    """Show how far two deltas of one model are from each other: distance and cosine, in all and by layer.

    Example:

      remtta delta diff night1 night2
    """
    with running.command():
        from remtta.deltas import DELTA
        from remtta.deltas.layers import layers_apart
        from remtta.deltas.reading import read_arrays

        paths = [path / DELTA if path.is_dir() else path for path in (first, second)]
        (fields, arrays), (others, more) = map(read_arrays, paths)
        if fields["base_sha256"] != others["base_sha256"]:
            raise DeltaError(
                f"{paths[1]} was made on other weights (base {others['base_sha256'][:12]}...) than {paths[0]} "
                f"({fields['base_sha256'][:12]}...), so their changes are of different models"
            )
        apart = layers_apart(arrays, more)
        content = {"deltas": [str(path) for path in paths], "layers": apart}
        typer.echo(json.dumps(content, indent=2) if printed.as_json else "\n".join(map(printable, _apart(apart))))


def _apart(layers: list[dict[str, Any]]) -> list[str]:
    width = max(len(layer["layer"] or "") for layer in layers) + 2
    return [
        f"{'layer':<{width}}  rms first  rms second  distance  cosine",
        *(
            f"{'(all)' if layer['layer'] is None else layer['layer']:<{width}}  {layer['rms'][0]:9.2e}  "
            f"{layer['rms'][1]:10.2e}  {layer['distance']:8.2e}  "
            f"{'-' if layer['cosine'] is None else format(layer['cosine'], '.3f'):>6}"
            for layer in layers
        ),
    ]


def average(
    deltas: Annotated[list[Path], typer.Argument(help="Two deltas or more, or the folders of their runs.")],
    target: TargetOptions,
    running: _Running,
) -> None:
    """Write the mean of DELTAS of one model, each weighted by the frames it was adapted on.

    Example:

      remtta delta average cam1 cam2 cam3 --output site.safetensors
    """
    with running.command():
        target.check()

        from remtta.deltas import mixing
        from remtta.deltas.delta import load_delta, save_delta

        loaded = [load_delta(path) for path in deltas]
        mean = mixing.average(loaded)
        save_delta(target.output, mean)
        if not running.quiet:
            shares = ", ".join(f"{parent['weight']:.3g}" for parent in mean.lineage["parents"])
            say(f"{target.output}: mean of {len(loaded)} deltas with weights {shares} ({mean.frames} frames)")


def scale(
    delta: _Delta,
    factor: Annotated[float, typer.Argument(help="0.5: half the way from the source to the adapted weights.")],
    target: TargetOptions,
    running: _Running,
) -> None:
    """Write DELTA times FACTOR: weights between the source's and the adapted ones.

    Example:

      remtta delta scale run1 0.5 --output half.safetensors
    """
    with running.command():
        target.check()

        from remtta.deltas.delta import load_delta, save_delta
        from remtta.deltas.mixing import scaled

        save_delta(target.output, scaled(load_delta(delta), factor))
        if not running.quiet:
            say(f"{target.output}: {delta} times {factor:g}")


def push(
    delta: Annotated[str, typer.Argument(help="A delta, its run folder, or a version that was pushed: FOLDER@3.")],
    folder: Annotated[
        str, typer.Argument(help="Folder of versions, made if need be, or a store: site/cam1, s3://bucket/site/cam1.")
    ],
    running: _Running,
) -> None:
    """Add DELTA to FOLDER as its newest version; no version is ever replaced.

    To go back, push an old version again.

    Examples:

      remtta delta push run1 /srv/deltas/site/cam1

      remtta delta push /srv/deltas/site/cam1@3 /srv/deltas/site/cam1

      remtta delta push run1 s3://bucket/site/cam1
    """
    with running.command():
        from remtta.deltas import registry

        version = registry.push(delta, folder)
        if not running.quiet:
            say(f"{without_password(folder)}@{version}: {without_password(delta)}")


def pull(
    version: Annotated[
        str, typer.Argument(help="Folder or store of versions, or one of them: site/cam1@3, s3://bucket/cam1@latest.")
    ],
    target: TargetOptions,
    running: _Running,
) -> None:
    """Copy a version of a delta that was pushed, the newest one unless VERSION names another.

    Example:

      remtta delta pull /srv/deltas/site/cam1@latest --output cam1.safetensors
    """
    with running.command():
        target.check()

        from remtta.deltas import registry

        pulled = registry.pull(version, target.output)
        if not running.quiet:
            say(f"{target.output}: version {pulled}")


def log(
    folder: Annotated[str, typer.Argument(help="Folder or store of versions: site/cam1, s3://bucket/site/cam1.")],
    printed: PrintOptions,
    running: Annotated[RunningOptions, Only("debug")],
) -> None:
    """List the versions of a delta that were pushed to FOLDER, the newest first, and where each comes from.

    Example:

      remtta delta log /srv/deltas/site/cam1
    """
    with running.command():
        from remtta.deltas.registry import history

        versions = history(folder)
        text = json.dumps({"versions": versions}, indent=2) if printed.as_json else "\n".join(map(_line, versions))
        typer.echo(text)


def _line(version: dict[str, Any]) -> str:
    if "error" in version:
        return printable(f"@{version['version']}  damaged: {version['error']}")
    lineage = version["lineage"]
    made = [lineage.get("made_by", ""), lineage.get("source", "")]
    parents = " ".join(parent["file_sha256"][:12] for parent in lineage.get("parents", []))
    return printable(
        f"@{version['version']}  {version['file_sha256'][:12]}  pushed {version['pushed'] or '-'}  "
        f"{version['method']}, {version['updates']} updates on {version['frames']} frames, made {version['created']}"
        f"{'; ' + ' '.join(filter(None, made)) if any(made) else ''}{'; from ' + parents if parents else ''}"
    )
