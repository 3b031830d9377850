"""Which loss each sequence of a batch has: that of the run, or that of its environment."""

from __future__ import annotations

from typing import Any

from lachesis_train.curves.rollouts import environment_of
from lachesis_train.tinker_sdk import Datum, LossPart
from lachesis_train.trainer.datums import PreparedBatch
from lachesis_train.trainer.settings import Settings


def data_and_losses(batch: PreparedBatch, settings: Settings) -> tuple[list[Datum], list[LossPart]]:
    """The sequences of a batch for the engine, and which loss each has. CPU-bound.

    They are scaled by the divisor of the whole batch, so that the loss of one environment does not change the weight of
    another.
    """
    own = _by_environment(batch, settings)
    data = []
    places: dict[tuple[Any, ...], list[int]] = {}
    for place, sample in enumerate(batch.samples):
        loss, parameters = own[environment_of(batch.bodies[sample.group])].loss
        data.append(sample.datum(loss))
        places.setdefault((loss, *parameters.items()), []).append(place)
    return data, [LossPart(of_loss, loss, dict(parameters)) for (loss, *parameters), of_loss in places.items()]


def ratio_bounds(batch: PreparedBatch, settings: Settings) -> tuple[float, float] | None:
    """Those of all losses of the batch, for the figures of clipping; None where they differ."""
    found = {each.ratio_bounds for each in _by_environment(batch, settings).values()}
    return found.pop() if len(found) == 1 else None


def _by_environment(batch: PreparedBatch, settings: Settings) -> dict[str | None, Settings]:
    names = {environment_of(body) for body in batch.bodies}
    return {name: settings.of_environment(name) for name in names}
