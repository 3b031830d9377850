"""The tests with a browser: a page of each in `make test` where the programs are, the rest in `make test-browser`."""

from __future__ import annotations

import os

import pytest

from lachesis_tools.browser import check_browser_requirements

ON_REQUEST = bool(os.environ.get("LACHESIS_NEED_BROWSER"))
needs_browser = pytest.mark.skipif(
    check_browser_requirements() is not None and not ON_REQUEST, reason=str(check_browser_requirements())
)
on_request = pytest.mark.skipif(not ON_REQUEST, reason="make test-browser runs it")
