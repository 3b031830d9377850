"""Helpers of the tests of all backends: those of the conformance suite, and skipping."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest

from lachesis_testing.backend_suite.probes import host_processes as host_processes
from lachesis_testing.backend_suite.probes import opened as opened
from lachesis_testing.backend_suite.probes import output as output
from lachesis_testing.backend_suite.probes import stopped as stopped
from lachesis_testing.backend_suite.probes import until as until


def missing(reason: str) -> NoReturn:
    """Skip a test that cannot run here. On CI, where everything is installed, that is a failure."""
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)
