"""The base class of every error that is meant to be read by a person."""

from __future__ import annotations

from typing import ClassVar


class LachesisError(Exception):
    """An expected failure. Its message names the thing, the reason and the next step, so commands print it without a
    traceback."""

    exit_code: ClassVar[int] = 1
    """Exit code of a command that ends with this error: 2 where other arguments are the remedy."""


class SettingsError(LachesisError, ValueError):
    """Settings that cannot be used."""

    exit_code = 2
