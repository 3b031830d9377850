"""Metrics that an environment's own `evaluate` reports: they are printed and written however it returns them."""

from __future__ import annotations

import numbers
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from lachesis.runs.run_folder import RunFolderError
from lachesis.settings.server_settings import ServerConfig
from lachesis.settings.setting_facts import without_secrets
from lachesis.settings.settings import HermesAgentEnvConfig


def write_settings(config: HermesAgentEnvConfig, servers: Iterable[ServerConfig]) -> None:
    """Write `evaluate_config.yaml` into `data_dir_to_save_evals`, as Atropos does, but without secrets."""
    asked = [without_secrets(each.model_dump(mode="json", exclude={"api_key", "headers"})) for each in servers]
    text = yaml.safe_dump({"env": config.public(), "openai": asked}, sort_keys=False, allow_unicode=True)
    path = Path(config.data_dir_to_save_evals or ".", "evaluate_config.yaml")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RunFolderError(f"cannot write {path}: {error.strerror or error}; make room there") from error


@dataclass
class OwnFigures:
    """Of one evaluation."""

    written: bool = False
    """Whether it called `evaluate_log`, which writes them."""
    logged: dict[str, float] = field(default_factory=dict)
    """Metrics that it passed to `wandb_log`, or left for it in `eval_metrics`, as Atropos' environments do."""

    def left(self, env: Any, result: Any) -> dict[str, float]:
        """The metrics that are not written yet: logged ones, and those of a dict that it returned."""
        if self.written:
            return {}
        returned = result if isinstance(result, Mapping) else {}
        return {**self.logged, **_numbers(_waiting(env)), **_numbers(returned)}


@contextmanager
def own_figures(env: Any) -> Iterator[OwnFigures]:
    """Record the metrics that the environment reports inside."""
    noted = OwnFigures()

    def write(call: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
        async def evaluate_log(*args: Any, **kwargs: Any) -> None:
            noted.written = True
            await call(*args, **kwargs)

        return evaluate_log

    def log(call: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
        async def wandb_log(wandb_metrics: Any = None, *args: Any, **kwargs: Any) -> None:
            noted.logged |= _numbers(_waiting(env)) | _numbers(wandb_metrics or {})
            await call(wandb_metrics, *args, **kwargs)

        return wandb_log

    def pass_on(call: Callable[..., Any]) -> Callable[..., Any]:
        # The base's wandb_log calls it with all metrics, also those that an override has added.
        def perf_stats(metrics_dict: Any, *args: Any, **kwargs: Any) -> Any:
            noted.logged |= _numbers(metrics_dict)
            return call(metrics_dict, *args, **kwargs)

        return perf_stats

    own = {name: vars(env)[name] for name in ("evaluate_log", "wandb_log", "perf_stats") if name in vars(env)}
    env.evaluate_log, env.wandb_log = write(env.evaluate_log), log(env.wandb_log)
    env.perf_stats = pass_on(env.perf_stats)
    try:
        yield noted
    finally:
        del env.evaluate_log, env.wandb_log, env.perf_stats
        vars(env).update(own)


def _waiting(env: Any) -> Any:
    """The list of (name, figure) that Atropos' environments fill in `evaluate` and log at the next step."""
    try:
        return dict(getattr(env, "eval_metrics", ()))
    except (TypeError, ValueError):
        return {}


def _numbers(given: Any) -> dict[str, float]:
    if not isinstance(given, Mapping):
        return {}
    return {
        str(name): int(value) if isinstance(value, numbers.Integral) else float(value)
        for name, value in given.items()
        if isinstance(value, numbers.Real)
    }
