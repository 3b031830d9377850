"""Errors of the engine, with the categories that Tinker's wire has for them."""

from __future__ import annotations

from backends.errors import LachesisError


class RequestError(LachesisError):
    """A request that cannot be served as it is: the client has to change it. On the wire: category `user`."""


class EngineStartError(LachesisError):
    """The subprocess of the engine did not start."""
