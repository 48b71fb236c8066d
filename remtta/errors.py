"""What remtta raises for bad input, and what a text may tell of an address.

RemttaError
├── UsageError        the request itself is wrong: no such source, nothing in it, output folder taken
│   └── ModelError    the model that was asked for cannot be built as asked, or cannot be adapted
├── DownloadError     what a model needs cannot be downloaded
├── CheckpointError   a checkpoint cannot be read or does not fit the model
├── DeltaError        a delta cannot be read or does not fit the model
├── StreamError       the source fails, or none of its frames can be read
├── FrameError        one frame cannot be read
└── OutputError       results cannot be written

UsageError is a ValueError too, so that a wrong setting in Python can be caught as either.
"""

from __future__ import annotations

import importlib
import math
import re
from typing import Any, Literal

_NAMES = "pass password passwd passwort pwd pw psw token access_token auth key api_key apikey secret sig signature"
_SECRETS = re.compile(rf"(?i)([?&;](?:{'|'.join(_NAMES.split(' '))})=)[^&;#]*")


class RemttaError(Exception):
    """Base of every error that a user's input can cause; its text is one line."""


class UsageError(RemttaError, ValueError):
    """The request cannot be met as stated."""


class ModelError(UsageError):
    """The model cannot be built as asked, or cannot be adapted."""


class DownloadError(RemttaError):
    """What is needed cannot be downloaded; another time it may."""


class CheckpointError(RemttaError):
    """A checkpoint cannot be read, is unsafe, or does not fit the model."""


class DeltaError(RemttaError):
    """A delta cannot be read, is damaged, or does not fit the model."""


class StreamError(RemttaError):
    """A source fails, or none of its frames can be read."""


class FrameError(RemttaError):
    """One frame cannot be read; its text says why. The stream goes on."""


class OutputError(RemttaError):
    """Results cannot be written."""


def check_finite(value: float, name: str, rule: Literal["> 0", ">= 0"] | None = None) -> None:
    """Refuse a number that is not finite, or breaks its rule; the records, which are JSON, hold no other.

    Raises:
        UsageError: Naming all three.
    """
    holds = math.isfinite(value) and (rule is None or value > 0 or (rule == ">= 0" and value == 0))
    check(holds, name, value, "a finite number" if rule is None else f"{rule} and finite")


def check(holds: bool, name: str, value: object, rule: str) -> None:
    """Refuse a value that breaks its rule.

    Raises:
        UsageError: Naming all three.
    """
    if not holds:
        raise UsageError(f"{name} must be {rule}, got {value}")


def counted(number: int, noun: str) -> str:
    """Return a count with its noun: "1 frame", "2 frames"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def needed(module: str, extra: str, what: str) -> Any:
    """Import a library that not every installation has.

    Raises:
        UsageError: If it is missing: what needs it, and the extra that installs it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UsageError(f'{what} needs {module}, which is not installed: pip install "remtta[{extra}]"') from error


def without_password(source: str) -> str:
    """An address as it may be shown and written down: `user:password@` becomes `***@`, `?pwd=x` becomes `?pwd=***`.

    A password with a slash is no valid address, and hidden all the same.
    """
    if "://" not in source:
        return source
    source = re.sub(r"(?<=://)(?:[^/]*@|[^/:@\[]*:(?!\d*(?:[/?#]|$)).*@)", "***@", source)
    return _SECRETS.sub(r"\1***", source)
