"""Workers that make sandboxes at Modal.

The workers are processes of this machine, which Modal's network could not reach: what they hold are connections to
sandboxes. Each slot is a Modal sandbox of its own, with the walls and the resources that Modal gives it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace

from backends.errors import SettingsError
from lachesis_pools.engines.engine import WorkerCommand
from lachesis_pools.engines.processes import ProcessEngine


class ModalEngine(ProcessEngine):
    """Workers whose sandboxes are at Modal."""

    name = "modal"

    def __init__(
        self,
        worker: WorkerCommand,
        *,
        app_name: str | None = None,
        gpu: str | None = None,
        secrets: Mapping[str, Sequence[str]] | str = "{}",
        region: str | None = None,
        cloud: str | None = None,
    ) -> None:
        """
        Args:
            app_name, region, cloud, gpu, secrets: as of the backend `modal`, which takes more with `--options`. On the
                command line, secrets are JSON.
        """
        keys = json.loads(secrets) if isinstance(secrets, str) else secrets
        if not isinstance(keys, Mapping):
            raise SettingsError(f"secrets are {{NAME: [VARIABLE, ...]}} for the engine 'modal', not {keys!r}")
        given = {"app_name": app_name, "gpu": gpu, "region": region, "cloud": cloud, "secrets": dict(keys)}
        options = json.loads(worker.options) | {name: value for name, value in given.items() if value}
        super().__init__(replace(worker, backend="modal", options=json.dumps(options)))
