"""Names of methods and settings that 0.5.0 spelt otherwise; still read in this release, with one warning."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from typing import Any

METHODS = {"centre": "center"}
_SETTINGS = {"centre": "center", "answer": "prediction_step"}

_log = logging.getLogger(__name__)


def current_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings under their names of today, with a warning per process for each old name."""
    for name in settings.keys() & _SETTINGS.keys():
        _warn(name)
    return _renamed(settings)


def current_record(method: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record of a method's settings, and of its name if there is one, under the names of today."""
    record = _renamed(method)
    return {**record, "name": METHODS.get(record["name"], record["name"])} if "name" in record else record


def _renamed(settings: Mapping[str, Any]) -> dict[str, Any]:
    renamed = {_SETTINGS.get(name, name): value for name, value in settings.items()}
    if "answer" in settings and settings["answer"] is None:
        renamed["prediction_step"] = "first"
    return renamed


@functools.cache
def _warn(name: str) -> None:
    _log.warning("the setting %s is now called %s", name, _SETTINGS[name])
