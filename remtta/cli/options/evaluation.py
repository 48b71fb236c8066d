"""By which protocol `remtta eval` measures which methods, and what it leaves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from remtta.cli.completion import method_list, scenarios
from remtta.cli.options.method import SharedSettings, SourceDataOptions
from remtta.cli.parsing import parse_names, parse_numbers, parse_pairs
from remtta.cli.reporting import refused_values
from remtta.errors import UsageError
from remtta.methods.settings import METHOD_CONFIGS, MethodConfig
from remtta.methods.settings.names import FAST, PRESET, check_method_names, label_of, method_of
from remtta.methods.settings.presets import named_config
from remtta.options import DEFAULT_BATCH_SIZE, SCENARIOS, EvalOptions
from remtta.runs.folder import default_folder

if TYPE_CHECKING:
    from remtta.evaluation.protocols import Protocol
    from remtta.evaluation.tables import Case

_protocol = partial(typer.Option, rich_help_panel="Protocol")
_method = partial(typer.Option, rich_help_panel="Method")
_output = partial(typer.Option, rich_help_panel="Output")


@dataclass(frozen=True)
class ProtocolOptions:
    """In which order a method meets the domains, and what is fixed by a publication."""

    protocol: Annotated[str | None, _protocol(help="rem-paper or rem-paper-cifar: the paper's settings.")] = None
    scenario: Annotated[
        str | None, _protocol(help=f"{', '.join(SCENARIOS)}. Default: continual.", autocompletion=scenarios)
    ] = None
    continual: Annotated[bool, _protocol("--continual", help="Reset only at the start.")] = False
    episodic: Annotated[bool, _protocol("--episodic", help="Reset at each domain.")] = False
    imbalance: Annotated[float, _protocol(help="Label shift: imbalance ratio, 1 to inf.")] = EvalOptions.imbalance
    dirichlet: Annotated[
        float | None,
        _protocol(help="Label shift: Dirichlet concentration instead. Irregular: of the pieces' lengths; default: 1."),
    ] = None
    visits: Annotated[int | None, _protocol(min=1, help="Recurring: how often each domain comes. Default: 20.")] = None
    cost_ratio: Annotated[
        float | None, _protocol(help="Time-constrained: update over forward pass; else measured.")
    ] = None
    unseen: Annotated[str | None, _protocol(help="Domains to test at the end, without learning.")] = None
    revisit: Annotated[bool, _protocol("--revisit", help="Test all domains again at the end.")] = EvalOptions.revisit
    order: Annotated[str | None, _protocol(help="shuffled or stored. Default: stored for arrays and lists.")] = None
    seeds: Annotated[str, _protocol("--seeds", "--seed", help="One run each: 0,1,2.")] = ",".join(
        map(str, EvalOptions.seeds)
    )

    def chosen_scenario(self) -> str:
        """The one scenario that was asked for.

        Raises:
            UsageError: If there were several.
        """
        flags = {"continual": self.continual, "episodic": self.episodic}
        asked = {name for name, given in flags.items() if given} | ({self.scenario} if self.scenario else set())
        if len(asked) > 1:
            raise UsageError(f"choose one scenario, got {', '.join(sorted(asked))}")
        return asked.pop() if asked else EvalOptions.scenario

    def fixed(self) -> Protocol | None:
        """What the protocol fixes.

        Raises:
            UsageError: If there is no such protocol.
        """
        from remtta.evaluation.protocols import PROTOCOLS

        if self.protocol is None:
            return None
        if self.protocol not in PROTOCOLS:
            raise UsageError(f'unknown protocol "{self.protocol}"; choose {" or ".join(PROTOCOLS)}')
        return PROTOCOLS[self.protocol]


@dataclass(frozen=True, kw_only=True)
class MethodsOptions:
    """The methods to measure, and their settings."""

    methods: Annotated[
        str,
        _method(
            help=f"Of {', '.join(METHOD_CONFIGS)}. {PRESET}: rem as remtta adapt runs it; {FAST}: by --preset {FAST}. "
            "rem+guard: under the guard; rem+both, rem+auto: answered by the source model, too. rem+smooth: by the "
            "frames before, too, where they come in order; rem+memory: from what a condition that comes back had "
            "taught. LABEL=rem: one more row, for --set LABEL.KEY=VALUE.",
            autocompletion=method_list,
        ),
    ] = "source,rem"
    settings: Annotated[
        list[str] | None,
        _method("--set", metavar="METHOD.KEY=VALUE", help="One method's (or label's) setting: tent.lr=1e-4."),
    ] = None
    shared: SharedSettings
    reset_every: Annotated[int | None, _method(min=1, help="Back to the source weights after this many images.")] = None
    source: SourceDataOptions

    def batch_size(self, fixed: Protocol | None) -> int:
        """Images per update: as given, or as the protocol has it."""
        if self.shared.batch_size is not None:
            return self.shared.batch_size
        return DEFAULT_BATCH_SIZE if fixed is None else fixed.batch_size

    def configs(self, shared: Mapping[str, Any], *, batch_size: int) -> dict[str, MethodConfig]:
        """A config per method: its defaults, what it has of the shared settings, and its own --set values.

        Raises:
            UsageError: If a name, a setting or a value is none, or no method has one of the shared settings.
        """
        names = parse_names(self.methods)
        check_method_names(names)
        own = _own_settings(names, self.settings or ())
        configs: dict[str, MethodConfig] = {}
        used: set[str] = set()
        for name in names:
            applying = {
                key: value
                for key, value in shared.items()
                if key in METHOD_CONFIGS[method_of(name)].__dataclass_fields__
            }
            used |= applying.keys()
            with refused_values():
                configs[name] = named_config(name, applying | own[name], batch_size=batch_size)
        if unused := shared.keys() - used:
            options = [
                f"--{'lambda' if name == 'ranking_weight' else name.replace('_', '-')}" for name in sorted(unused)
            ]
            raise UsageError(f"none of {', '.join(names)} has a setting for {', '.join(options)}")
        return configs


def _own_settings(names: Sequence[str], settings: Sequence[str]) -> dict[str, dict[str, Any]]:
    """What --set says for each of the methods."""
    own: dict[str, dict[str, Any]] = {name: {} for name in names}
    # What is said for a method holds for all its rows, unless something else is said for a label.
    for text in sorted(settings, key=lambda text: text.partition(".")[0] not in METHOD_CONFIGS):
        method, _, setting = text.partition(".")
        meant = [name for name in names if method in (name, label_of(name), method_of(name))]
        if not meant:
            raise UsageError(f"--set {text}: write METHOD.KEY=VALUE with a method of --methods ({', '.join(own)})")
        for name in meant:
            own[name] |= parse_pairs([setting], "--set")
    return own


@dataclass(frozen=True)
class ResultOptions:
    """Where the results go."""

    output: Annotated[Path | None, _output("--output", "-o", help="Folder for results. Default: runs/<UTC time>.")] = (
        None
    )
    overwrite: Annotated[bool, _output("--overwrite", help="Replace an earlier evaluation.")] = False
    resume: Annotated[
        bool, _output("--resume", help="Go on with the evaluation in --output, if there is one; methods may be added.")
    ] = False
    engine: Annotated[
        Literal["serial", "processes", "ray"],
        _output(help="Runs of methods and seeds one after the other, by processes here, or by the workers of Ray."),
    ] = EvalOptions.engine
    jobs: Annotated[
        int | None, _output("--jobs", "-j", min=1, help="Processes. Default: one per core, or per GPU.")
    ] = None
    plots: Annotated[bool, _output("--plots/--no-plots", help="Draw pictures, with matplotlib.")] = True
    on_error: Annotated[Literal["skip", "stop"], _output(help="At an image that cannot be read.")] = (
        EvalOptions.on_error
    )

    def check_folders(self, output: Path, cases: Sequence[Case]) -> None:
        """Refuse, before anything is run, what one of several evaluations would refuse after others.

        Raises:
            UsageError: If the folder holds a single evaluation, or some of these that are not to be touched.
        """
        from remtta.evaluation.axes import check_folders

        check_folders(output, cases, may_exist=self.resume or self.overwrite)

    def folder(self) -> Path:
        """The folder for the results.

        Raises:
            UsageError: If there is none to go on with.
        """
        if self.resume and self.output is None:
            raise UsageError("--resume needs the --output of the evaluation to go on with")
        return self.output or default_folder()


@refused_values()
def eval_options(
    scenario: str, batch_size: int, protocol: ProtocolOptions, methods: MethodsOptions, results: ResultOptions
) -> EvalOptions:
    """How the evaluation is run.

    Raises:
        UsageError: If a value is out of range, or not for this scenario.
    """
    return EvalOptions(
        scenario=scenario,
        batch_size=batch_size,
        seeds=parse_numbers(protocol.seeds, "--seeds"),
        order="shuffled" if protocol.order is None else protocol.order,  # type: ignore[arg-type]  # it is checked
        unseen=tuple(parse_names(protocol.unseen)),
        revisit=protocol.revisit,
        imbalance=protocol.imbalance,
        dirichlet=protocol.dirichlet,
        visits=protocol.visits,
        cost_ratio=protocol.cost_ratio,
        reset_every=methods.reset_every,
        on_error=results.on_error,
        overwrite=results.overwrite,
        resume=results.resume,
        engine=results.engine,
        jobs=results.jobs,
        protocol=protocol.protocol,
    )
