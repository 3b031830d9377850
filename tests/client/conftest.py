"""Fixtures of the tests of the client."""

from __future__ import annotations

from tests.support.served_client import serve as serve
