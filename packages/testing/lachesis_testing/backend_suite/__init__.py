"""The conformance suite of sandbox backends. A backend is complete when it passes.

    # test_my_backend.py
    import pytest
    from lachesis_testing.backend_suite import *
    from my_package import MyBackend

    @pytest.fixture(scope="session")
    def backend():
        return MyBackend()

It needs pytest and pytest-asyncio, and bash and Python inside the sandboxes. `docs/backend-plugins.md` has an example.
"""

import pytest

for _module in (
    "attacks",
    "commands",
    "fixtures",
    "files",
    "forwarding",
    "kernel",
    "leftovers",
    "lifecycle",
    "limits",
    "probes",
    "processes",
):
    pytest.register_assert_rewrite(f"{__name__}.{_module}")

from .attacks import *  # noqa: E402, F403
from .attacks import targets  # noqa: E402
from .commands import *  # noqa: E402, F403
from .files import *  # noqa: E402, F403
from .fixtures import (  # noqa: E402
    expected_to_fall,
    find_processes,
    has_every_method,
    portable_backend,
    sandbox,
    shared_sandboxes,
    unchecked,
)
from .forwarding import *  # noqa: E402, F403
from .kernel import *  # noqa: E402, F403
from .leftovers import *  # noqa: E402, F403
from .lifecycle import *  # noqa: E402, F403
from .limits import *  # noqa: E402, F403
from .processes import *  # noqa: E402, F403

pytestmark = pytest.mark.asyncio(loop_scope="session")

__all__ = [name for name in globals() if name.startswith("test_")]
__all__ += ["find_processes", "has_every_method", "portable_backend", "pytestmark", "sandbox", "shared_sandboxes"]
__all__ += ["expected_to_fall", "targets", "unchecked"]
