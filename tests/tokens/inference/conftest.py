"""Fixtures of the tests of engines and prompts."""

from __future__ import annotations

import pytest

from tests.support.served_client import serve as serve

pytest.register_assert_rewrite("lachesis_testing.engine_suite")
