"""Exceptions that remtta raises for bad input, and the removal of passwords from addresses."""

from __future__ import annotations

import contextlib
import difflib
import importlib.util
import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from types import ModuleType

_SECRETS = re.compile(
    r"(?i)((?:pas|ps?w|pword|secret|token|signature|cred|auth(?!or))[\w.%-]{0,32}=|"
    r"(?<![^\W_])(?:p|pin|(?:(?:api|stream)_?)?key|sig|jwt)=)[^&;#]*|"
    r"(streamid=(?:(?:publish|play|read|request):)?)[^&]+|"  # of SRT; may begin with #!::
    r"((?<![^\W_])live_\d{5,}_)[^\W_]{12,}+(?!\.\w)"  # of Twitch
)
_GROUPS = r"(?:\w{4}|[\da-fA-F]{8})(?:-\w{4}){3,}\w*"  # as in stream keys and UUIDs
_WORDS = re.compile(rf"(?<![^\W_])(?:{_GROUPS}|[a-zA-Z\d]{{12,}})(?![^\W_]|\.\w)")
_CHANGES = re.compile(r"[a-zA-Z](?=\d)|\d(?=[a-zA-Z])|[a-z](?=[A-Z])")


class RemttaError(Exception):
    """Base class of all errors caused by a user's input; the message is one line."""


class UsageError(RemttaError, ValueError):
    """The request cannot be met as stated; also a ValueError, as for a wrong setting in Python."""


class ModelError(UsageError):
    """The model cannot be built as requested, or cannot be adapted."""


class NotFiniteError(RemttaError):
    """The model's outputs are not finite numbers."""


class DownloadError(RemttaError):
    """Something needed cannot be downloaded, perhaps temporarily."""


class CheckpointError(RemttaError):
    """A checkpoint cannot be read, is unsafe, or does not fit the model."""


class DeltaError(RemttaError):
    """A delta cannot be read, is damaged, or does not fit the model."""


class StreamError(RemttaError):
    """A source fails, or none of its frames can be read."""


class FrameError(RemttaError):
    """One frame cannot be read; the message says why. The stream continues."""


class OutputError(RemttaError):
    """Results cannot be written; whatever writes files raises it."""


def check(holds: bool, name: str, value: object, rule: str) -> None:
    """Raise UsageError with the name of a setting, its value and the rule, unless the rule holds."""
    if not holds:
        raise UsageError(f"{name} must be {rule}, got {value}")


def unknown(what: str, name: str, known: Iterable[str]) -> UsageError:
    """Return the error for an unknown name, with the closest known one, or else with all."""
    names = list(known)
    close = difflib.get_close_matches(str(name).lower(), names, n=1)
    remedy = f"did you mean {close[0]}?" if close else f"choose {', '.join(names)}"
    return UsageError(f'unknown {what} "{name}"; {remedy}')


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message, or else the name of its class."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def counted(number: int, noun: str) -> str:
    """Return a count with its noun: "1 frame", "2 frames"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def listed(items: Sequence[str], most: int) -> str:
    """Return at most `most` items, and the number of the others: "a, b and 3 more"."""
    rest = len(items) - most
    return ", ".join(items[:most]) + (f" and {rest} more" if rest > 0 else "")


def needed(module: str, extra: str, what: str) -> ModuleType:
    """Import an optional dependency; raise UsageError, with the feature and its extra, if it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise _missing(module, extra, what) from error


def check_installed(module: str, extra: str, what: str) -> None:
    """Raise UsageError as `needed` does, but import nothing: before slow work."""
    if importlib.util.find_spec(module) is None:
        raise _missing(module, extra, what)


def _missing(module: str, extra: str, what: str) -> UsageError:
    """Return the error that names the packages of an extra, which pip finds from anywhere; remtta is not on PyPI."""
    from importlib.metadata import PackageNotFoundError, requires  # slow to import

    wanted: list[str] = []
    with contextlib.suppress(PackageNotFoundError):  # remtta itself may be imported from a folder
        of_extra = re.compile(rf"extra == ['\"]{extra}['\"]")
        wanted = [text.partition(";")[0].strip() for text in requires("remtta") or () if of_extra.search(text)]
    packages = " ".join(f'"{package}"' for package in wanted or [module])
    return UsageError(f"{what} needs {module}, which is not installed: pip install {packages}")


@contextlib.contextmanager
def logging_at(level: int, log: logging.Logger) -> Iterator[None]:
    """Log only messages of this level and above within the block."""
    earlier = log.level
    log.setLevel(level)
    try:
        yield
    finally:
        log.setLevel(earlier)


def without_password(source: str) -> str:
    """Return an address without its secrets: `user:password@` becomes `***@`, `?pwd=x` becomes `?pwd=***`, and what
    looks like a random key in its path or its values becomes `***`, but for file names.

    Passwords with a slash, which make an address invalid, are removed as well.
    """
    if "://" not in source:
        return source
    source = re.sub(r"(?<=://)(?:[^/]*@|[^/:@\[]*:(?!\d*(?:[/?#]|$)).*@)", "***@", source)
    host = re.match(r".*?://[^/?#]*", source := _SECRETS.sub(r"\1\2\3***", source))
    return host[0] + _WORDS.sub(_without_key, source[host.end() :]) if host else source


def _without_key(word: re.Match[str]) -> str:
    """Mask a word if letters, digits and cases alternate in it more often than in names, numbers and times; groups
    of four if most have letters, as those of dates have not.
    """
    groups = word[0].split("-")
    random = 5 * len(_CHANGES.findall(word[0])) > len(word[0])
    if len(groups) > 1:
        random = 2 * sum(any(sign.isalpha() for sign in group) for group in groups) >= len(groups)
    return "***" if random else word[0]
