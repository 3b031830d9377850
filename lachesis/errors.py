"""The base class of every error that is meant to be read by a person."""

from __future__ import annotations


class LachesisError(Exception):
    """An expected failure. Its message names the thing, the reason and the next step, so commands print it without a
    traceback."""
