"""All our backends pass the conformance suite that is offered to others; `backend` is a fixture of conftest.py."""

from lachesis.testing.backend_suite import *  # noqa: F403
