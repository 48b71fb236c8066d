"""What remtta raises for bad input.

RemttaError
├── UsageError        the request itself is wrong: no such source, output folder taken
├── ModelError        the model cannot be built, downloaded or adapted
├── CheckpointError   a checkpoint cannot be read or does not fit the model
├── DeltaError        a delta cannot be read or does not fit the model
├── StreamError       the source yields no frames
└── OutputError       results cannot be written

A wrong call from Python raises ValueError instead.
"""

from __future__ import annotations


class RemttaError(Exception):
    """Base of every error that a user's input can cause; its text is one line."""


class UsageError(RemttaError):
    """The request cannot be met as stated."""


class ModelError(RemttaError):
    """The model cannot be built, downloaded or adapted."""


class CheckpointError(RemttaError):
    """A checkpoint cannot be read, is unsafe, or does not fit the model."""


class DeltaError(RemttaError):
    """A delta cannot be read, is damaged, or does not fit the model."""


class StreamError(RemttaError):
    """A source cannot be opened or yields no frames."""


class OutputError(RemttaError):
    """Results cannot be written."""
