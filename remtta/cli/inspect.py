"""`remtta inspect`: what a delta, or the folder of a run or an evaluation, holds, and how two deltas differ."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from remtta.cli.running import PrintOptions, RunningOptions
from remtta.errors import UsageError
from remtta.options.option import Only
from remtta.runs.reading import printable


def inspect(
    path: Annotated[
        Path, typer.Argument(help="A delta file, or the folder of a run, of many streams or an evaluation.")
    ],
    printed: PrintOptions,
    running: Annotated[RunningOptions, Only("debug")],
    other: Annotated[
        Path | None, typer.Argument(help="Another delta or run, of the same model: show distance and cosine by layer.")
    ] = None,
) -> None:
    """Show what a delta, a run or an evaluation holds: which layers moved and by how much, what was predicted.

    Examples:

      remtta inspect runs/20261120T120000Z

      remtta inspect run1/delta.safetensors --json | jq .delta.layers

      remtta inspect night1 night2
    """
    with running.command():
        from remtta.report.inspection import compare_deltas, describe_delta, describe_folder

        for each in (path, other or path):
            if not each.exists():
                raise UsageError(f"{each}: no such file or folder")
        if other is not None:
            content = compare_deltas(path, other)
        else:
            content = describe_folder(path) if path.is_dir() else {"delta": describe_delta(path)}
        typer.echo(json.dumps(content, indent=2) if printed.as_json else "\n".join(map(printable, _lines(content))))


def _lines(content: dict[str, Any]) -> list[str]:
    if "deltas" in content:
        return _comparison_lines(content["layers"])
    lines: list[str] = []
    if "evaluation" in content:
        lines += _evaluation_lines(content["evaluation"], alive=content["alive"])
    if "site" in content:
        lines += _site_lines(content["site"], alive=content["alive"])
    if "run" in content:
        lines += _run_lines(content["run"], alive=content["alive"])
    if "predictions" in content:
        lines += _prediction_lines(content["predictions"])
    if "delta" in content:
        lines += _delta_lines(content["delta"])
    return lines


def _state(told: str, alive: bool | None, end: str) -> str:
    """How it is; one that says it is running, and that no process is writing to, came to this end."""
    return f"was {end}, and --resume goes on with it" if told == "running" and alive is False else told


def _site_lines(site: dict[str, Any], *, alive: bool | None) -> list[str]:
    streams = site["streams"]
    width = max([len("stream"), *map(len, streams)])
    return [
        f"streams      {_state(site['exit_reason'], alive, 'killed')}; {len(streams)} on one model",
        "",
        f"{'stream':<{width}}  frames  skipped  updates  state, source",
        *(
            f"{name:<{width}}  {stream['frames']:6}  {stream['skipped']:7}  {stream['updates']:7}  "
            f"{_state(stream['exit_reason'], alive, 'killed')}, {stream['source']}"
            for name, stream in streams.items()
        ),
    ]


def _evaluation_lines(evaluation: dict[str, Any], *, alive: bool | None) -> list[str]:
    settings, results = evaluation["settings"], evaluation["methods"]
    data, model, options = settings["data"], settings["model"], settings["options"]
    state, seeds = _state(evaluation["status"], alive, "stopped"), ",".join(map(str, options["seeds"]))
    width = max(map(len, settings["methods"]), default=0)
    table = [f"{'method':<{width}}  mean error  gain   ECE"] if results else []
    return [
        f"evaluation   {state}; {options['scenario']}, batch {options['batch_size']}, "
        f"seeds {seeds}{' on ' + settings['device'] if settings.get('device') else ''}",
        f"data         {data['root']} ({data['layout']}), {len(data['domains'])} domains",
        f"model        {model.get('name') or 'unknown'}, base {model['base_sha256'][:12]}",
        f"methods      {', '.join(settings['methods'])}{'' if results else '; no results yet'}",
        *["", *table],
        *(_result_line(f"{name:<{width}}", result) for name, result in results.items()),
    ]


def _result_line(name: str, result: dict[str, Any]) -> str:
    gain = "" if result["gain"] is None else f"{result['gain']:+.1f}"
    spread = "" if result["mean_std"] is None else f"  ± {result['mean_std']:.1f} over seeds"
    return f"{name}  {result['mean']:8.1f} %  {gain:>4}  {100 * result['ece']:4.1f}{spread}"


def _run_lines(run: dict[str, Any], *, alive: bool | None) -> list[str]:
    counts, timing, model, method = run["counts"], run["timing"], run["model"], run["method"]
    state = _state(run["exit_reason"], alive, "killed")
    return [
        f"run          {state}; started {timing['started']}, {timing['seconds']} s, "
        f"{timing['images_per_s']} images/s on {run['environment']['device']}",
        f"source       {run['source']['name']} ({run['source']['kind']})",
        f"model        {model.get('name') or 'unknown'}, {model['num_classes']} classes, "
        f"base {model['base_sha256'][:12]}",
        f"method       {method['name']}, batch {method['batch_size']}{_settings(method)}",
        f"frames       {counts['frames']}, {counts['skipped']} skipped; {counts['updates']} updates{_more(counts)}",
        *_guard_lines(run.get("guard"), run.get("options")),
        *_pace_lines(run.get("pace")),
    ]


def _pace_lines(pace: dict[str, int] | None) -> list[str]:
    if pace is None:
        return []
    share = 100 * pace["adapted_on"] / max(1, pace["frames"])
    return [f"pace         adapted on {share:.0f} % of frames; {pace['changes']} changes"]


def _guard_lines(guard: dict[str, Any] | None, options: Any) -> list[str]:
    if guard is None:
        return ["guard        none; the adapted model answers"]
    ended = "; adaptation has ended" if guard.get("retired") else ""
    both = guard.get("answered_by_both", 0)
    shared = f", {both} by both models" if both else ""
    asked = options.get("guard") if isinstance(options, dict) else None
    names = ("action", "answer") if isinstance(asked, dict) else ()
    kinds = [f"{name} {asked[name]}" for name in names if asked and name in asked]
    told = f"{guard['alarms']} alarms, {guard['answered_by_source']} frames answered by the source{shared}{ended}"
    return [f"guard        {', '.join([*kinds, told])}"]


def _more(counts: dict[str, int]) -> str:
    """Counts that are seldom anything but 0."""
    texts = {"not_adapted": "not adapted on", "dropped": "dropped for newer ones", "gaps": "gaps"}
    return "".join(f"; {counts[name]} {text}" for name, text in texts.items() if counts.get(name))


def _settings(method: dict[str, Any]) -> str:
    settings = [f"lr {method['lr']:g} ({method.get('optimizer')})"] if method.get("lr") is not None else []
    if method.get("mask_ratios") is not None:
        settings.append(f"mask ratios {' '.join(f'{ratio:g}' for ratio in method['mask_ratios'])}")
    if method.get("ranking_weight") is not None:
        settings.append(f"lambda {method['ranking_weight']:g}")
    if method.get("anchor"):
        settings.append(f"anchor {method['anchor']:.3g}")
    return "".join(f", {setting}" for setting in settings)


def _prediction_lines(predictions: dict[str, Any]) -> list[str]:
    common = [f"{entry['label'] or entry['class']} ({entry['frames']})" for entry in predictions["most_common"]]
    if not predictions["predicted"]:
        return ["predictions  none"]
    return [
        f"predictions  {predictions['predicted']}, mean entropy {predictions['mean_entropy']:.3f} nats, "
        f"{predictions['classes_predicted']} classes",
        f"most common  {', '.join(common)}",
    ]


def _delta_lines(delta: dict[str, Any]) -> list[str]:
    layers = delta["layers"]
    width = max([len(layer["layer"]) for layer in layers], default=5)
    return [
        f"delta        {delta['tensors']} tensors, {delta['parameters']} parameters, {delta['bytes']} bytes",
        f"made         {delta['created']} by remtta {delta['remtta_version']}, {delta['method']}, "
        f"{delta['updates']} updates on {delta['frames']} frames since the source weights",
        f"base         {delta['model']}, {delta['base_sha256'][:12]}",
        *_lineage_lines(delta["lineage"]),
        "",
        f"{'layer':<{width}}  rms change  largest change",
        *(f"{layer['layer']:<{width}}  {layer['rms']:10.2e}  {layer['max']:14.2e}" for layer in layers),
    ]


def _lineage_lines(lineage: dict[str, Any]) -> list[str]:
    """Which run made a delta, of what, and the deltas it builds on."""
    told = [lineage.get("made_by"), lineage.get("source"), lineage.get("kind") and f"({lineage['kind']})"]
    run = f"run {lineage['run'][:12]}" if lineage.get("run") else None
    parents = [
        f"from         {parent['file_sha256'][:12]}, {parent['method']}, {parent['updates']} updates on "
        f"{parent['frames']} frames{', ' + parent['source'] if parent.get('source') else ''}"
        for parent in lineage.get("parents", [])
    ]
    made = ", ".join(filter(None, [" ".join(filter(None, told)), run]))
    return [*([f"lineage      {made}"] if made else []), *parents]


def _comparison_lines(layers: list[dict[str, Any]]) -> list[str]:
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
