"""The small requests of Atropos' `run-api` 0.4.0, and what the extension adds to them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, Field, FiniteFloat, ValidationError

from lachesis_train.api.state import ApiState, RegisteredEnv
from lachesis_train.group_encoding import GroupError

LEAST_WEIGHT = 0.01
"""Of an environment in `/status-env`, as in the stock API."""

M = TypeVar("M", bound=BaseModel)

Number = Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]
"""What the database can hold."""
Size = Annotated[int, Field(ge=1, lt=1 << 63)]


class TrainerRequest(BaseModel):
    """`POST /register`."""

    wandb_group: str
    wandb_project: str
    batch_size: Size
    max_token_len: Number
    checkpoint_dir: str
    save_checkpoint_interval: Number
    starting_step: Number
    num_steps: Number
    acknowledges: bool = False
    """Extension: the trainer acknowledges batches with `POST /ack`."""


class EnvRequest(BaseModel):
    """`POST /register-env`."""

    max_token_length: Number
    desired_name: str
    weight: FiniteFloat
    group_size: Size
    min_batch_allocation: Annotated[float, Field(ge=0, le=1)] | None = None


class EnvIdentifier(BaseModel):
    """`POST /disconnect-env` and `GET /status-env`."""

    env_id: int
    group_ids: bool = False
    """Extension: list the ids of the environment's groups that wait."""


class Acknowledgement(BaseModel):
    """`POST /ack` (extension)."""

    batch_id: int
    trainer: str = ""


def parse(model: type[M], body: bytes) -> M:
    """Raises GroupError, which is answered with 422."""
    try:
        return model.model_validate_json(body or b"null")
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'body'}: {e['msg']}" for e in error.errors())
        raise GroupError(problems) from error


def env_status(state: ApiState, env: RegisteredEnv) -> dict[str, Any]:
    """The answer of `/status-env`: the stock API's figures, then those of the extension."""
    counts = state.sequences_by_env()
    batch_size = state.trainer.batch_size if state.trainer else 0
    largest = max((group.sequences for group in state.waiting.values()), default=1)
    own_largest = max((group.sequences for group in state.waiting_of(env.env_id)), default=1)
    unit = max(env.group_size, own_largest)
    least = own_sequences(state.environments, batch_size)
    others = 0
    for env_id, sequences in counts.items():
        if env_id != env.env_id and largest > 1:
            packed = -(-sequences // largest) * largest
            others += max(0, packed - (int(least.get(env_id, 0)) if env_id is not None else 0))
    total = sum(each.max_token_length * max(0.0, each.weight) for each in state.environments if each.connected)
    own = counts[env.env_id]
    allocated = sum(each.min_batch_allocation or 0.0 for each in state.environments if each.connected)
    return {
        "current_step": state.step,
        "queue_size": (own + others) // unit,
        "unallocated_fraction": 1.0 - min(allocated, 1.0),
        "self_queue_size": own // unit,
        "max_group_size": largest,
        "env_weight": max(LEAST_WEIGHT, env.max_token_length * env.weight / total if total else 0.0),
        "self_sequences": own,
        "registrations": state.registrations,
    }


def own_sequences(environments: list[RegisteredEnv], batch_size: int) -> Mapping[int, float]:
    """Sequences of a batch that belong to environments with a `min_batch_allocation`, by env_id."""
    shares = {
        env.env_id: env.min_batch_allocation for env in environments if env.connected and env.min_batch_allocation
    }
    scale = max(1.0, sum(shares.values()))
    return {env_id: batch_size * share / scale for env_id, share in shares.items()}
