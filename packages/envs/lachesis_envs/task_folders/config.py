"""`task.toml` of Harbor's task folders, version 1.4, as models whose attributes have the names of the file.

They accept what Harbor 0.25 accepts, and resolve it to the same values: a test compares both on fuzzed files. Keys that
they do not know are kept in `model_extra`. What nothing here can honour is refused later, in `refusals.py`.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Mapping
from ipaddress import ip_address, ip_network
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    field_validator,
    model_validator,
)

NetworkMode = Literal["public", "no-network", "allowlist"]
VerifierMode = Literal["shared", "separate"]
User = str | int
"""A user name or a number; None is the user of the image."""


class Section(BaseModel):
    """A table of the file."""

    model_config = ConfigDict(extra="allow", frozen=True)


def _allowed_host(text: str) -> str:
    """The normal form of a host name, `*.name`, IP address or network in CIDR notation."""
    host = text.strip().lower().rstrip(".")
    name = host.removeprefix("*.")
    if "%" not in host and ("/" in host or ":" in host):
        return ip_network(host).compressed if "/" in host else ip_address(host).compressed
    if name != host and _is_address(name):
        raise ValueError(f"{text!r}: a wildcard stands for names, not for addresses")
    if not all(re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", label) for label in name.split(".")):
        raise ValueError(
            f"{text!r} is not a host name, '*.name', IP address or network (URLs, ports and paths are not)"
        )
    return host


def _is_address(text: str) -> bool:
    try:
        ip_address(text)
    except ValueError:
        return False
    return True


Hosts = list[Annotated[str, AfterValidator(_allowed_host)]]


class Network(Section):
    """Network of a phase. Without a mode it is that of the environment."""

    network_mode: NetworkMode | None = None
    allowed_hosts: Hosts | None = None

    @model_validator(mode="after")
    def _hosts_need_the_allowlist(self) -> Network:
        hosts = self.allowed_hosts
        if self.network_mode != "allowlist" and (hosts or (hosts is not None and self.network_mode is None)):
            raise ValueError("allowed_hosts needs network_mode = 'allowlist'")
        return self


class Author(Section):
    name: str
    email: str | None = None


class PackageInfo(Section):
    """The section `[task]`."""

    name: str
    """`organisation/name`."""
    version: str | None = Field(default=None, min_length=1)
    description: str = ""
    authors: list[Author] = []
    keywords: list[str] = []

    @field_validator("name")
    @classmethod
    def _name_has_an_organisation(cls, name: str) -> str:
        word = r"[a-zA-Z0-9][a-zA-Z0-9._-]*"
        if not re.fullmatch(f"{word}/{word}", name) or ".." in name:
            raise ValueError(f"{name!r} is not 'organisation/name' of letters, digits, '-', '_' and '.'")
        return name


class AgentConfig(Network):
    timeout_sec: float | None = None
    user: User | None = None


class SolutionConfig(Section):
    env: dict[str, str] = {}


class HealthcheckConfig(Section):
    """A command that must succeed before the agent starts; as Docker's HEALTHCHECK. Times are in seconds."""

    command: str
    interval_sec: float = 5.0
    timeout_sec: float = 30.0
    start_period_sec: float = 0.0
    start_interval_sec: float = 5.0
    retries: int = 3


class TpuSpec(Section):
    type: str = Field(min_length=1)
    topology: Annotated[str, AfterValidator(str.strip), Field(pattern=r"^\s*[1-9]\d*(x[1-9]\d*)+\s*$")]


def _is_service_name(name: str | None) -> str | None:
    if name is not None and not re.match(r"[a-zA-Z0-9][a-zA-Z0-9_.-]*$", name := name.strip()):
        raise ValueError(f"{name!r} is not a name of a Docker Compose service")
    return name


class McpServerConfig(Section):
    name: str
    transport: Annotated[
        Literal["stdio", "sse", "streamable-http"],
        BeforeValidator(lambda value: "streamable-http" if value == "http" else value),
    ] = "sse"
    url: str | None = None
    command: str | None = None
    args: list[str] = []
    headers: dict[str, str] = {}

    @model_validator(mode="after")
    def _transport_has_its_fields(self) -> McpServerConfig:
        needed = "command" if self.transport == "stdio" else "url"
        if not getattr(self, needed):
            raise ValueError(f"transport {self.transport!r} needs {needed!r}")
        if self.transport == "stdio" and self.headers:
            raise ValueError("transport 'stdio' has no headers")
        return self


def _megabytes(text: str) -> int:
    """Of a size as `512M` or `1.5G`; a value that is too small for a megabyte is 0."""
    size = text.strip().upper()
    factors = {"G": 1024, "M": 1, "K": 1 / 1024}
    if size[-1:] not in factors:
        raise ValueError(f"{text!r} is not a size as '1G' or '512M'")
    number = float(size[:-1]) * factors[size[-1]]
    if not math.isfinite(number):
        raise ValueError(f"{text!r} is not a finite size")
    return int(number)


def _finite(number: int | float | None) -> int | float | None:
    if isinstance(number, float) and not math.isfinite(number):
        raise ValueError(f"{number} is not finite")
    return int(number) if isinstance(number, float) and number.is_integer() else number


_INTERNET = TypeAdapter(bool | None)


class EnvironmentConfig(Section):
    """The sections `[environment]` and `[verifier.environment]`."""

    network_mode: NetworkMode = "public"
    allowed_hosts: Hosts | None = None
    build_timeout_sec: float = 600.0
    docker_image: str | None = None
    os: Annotated[
        Literal["linux", "windows"], BeforeValidator(lambda value: value.lower() if isinstance(value, str) else value)
    ] = "linux"
    cpus: Annotated[int | float | None, AfterValidator(_finite)] = None
    memory_mb: int | None = None
    storage_mb: int | None = None
    gpus: int | None = None
    gpu_types: list[str] | None = None
    tpu: TpuSpec | None = None
    mcp_servers: list[McpServerConfig] = []
    env: dict[str, str] = {}
    skills_dir: str | None = None
    healthcheck: HealthcheckConfig | None = None
    workdir: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _deprecated_keys(cls, data: Any) -> Any:
        """`memory` and `storage` ("1G") and `allow_internet` as the keys that took their place."""
        if not isinstance(data, Mapping):
            return data
        data = dict(data)
        for old in ("memory", "storage"):
            if isinstance(size := data.get(old), str):
                new, number = f"{old}_mb", _megabytes(data.pop(old))
                if data.setdefault(new, number) != number:
                    raise ValueError(f"{old} = {size!r} contradicts {new} = {data[new]!r}")
        internet = _INTERNET.validate_python(data.pop("allow_internet", None))
        if internet is not None and "network_mode" not in data and data.get("allowed_hosts") is None:
            data["network_mode"] = "public" if internet else "no-network"
        return data

    @model_validator(mode="after")
    def _hosts_need_the_allowlist(self) -> EnvironmentConfig:
        if self.allowed_hosts and self.network_mode != "allowlist":
            raise ValueError("allowed_hosts needs network_mode = 'allowlist'")
        return self


class CollectConfig(Section):
    """A command that runs between the agent and the verifier."""

    command: str
    service: Annotated[str, AfterValidator(_is_service_name)] = "main"
    timeout_sec: float = 60.0
    user: User | None = None


class VerifierConfig(Network):
    timeout_sec: float = 600.0
    env: dict[str, str] = {}
    user: User | None = None
    environment_mode: VerifierMode | None = None
    environment: EnvironmentConfig | None = None
    collect: list[CollectConfig] = []

    @model_validator(mode="after")
    def _shared_has_no_environment(self) -> VerifierConfig:
        if self.environment_mode == "shared" and self.environment is not None:
            raise ValueError("environment_mode = 'shared' and [verifier.environment] exclude each other")
        return self


def _inside(path: str) -> str:
    if ".." in PurePosixPath(path).parts:
        raise ValueError(f"{path!r} contains '..'")
    return path


class ArtifactConfig(Section):
    """A file or folder that is taken out of the environment."""

    source: str
    destination: str | None = None
    """Path below the folder of artifacts; None is that of the source."""
    exclude: list[str] = []
    service: Annotated[str | None, AfterValidator(_is_service_name)] = None

    @model_validator(mode="after")
    def _paths_stay_inside(self) -> ArtifactConfig:
        _inside(self.source)
        if self.service not in (None, "main") and not re.match(r"/|[A-Za-z]:[/\\]", self.source):
            raise ValueError(f"source {self.source!r} of the service {self.service!r} is not absolute")
        return self

    @field_validator("destination")
    @classmethod
    def _destination_is_relative(cls, text: str | None) -> str | None:
        parts = PurePosixPath(text or "x").parts
        if not parts or "\\" in (text or "") or parts[0].startswith("/") or ".." in parts:
            raise ValueError(f"{text!r} is not a relative path with '/' and without '..'")
        if (text or "").rstrip("/") == "manifest.json":
            raise ValueError("manifest.json is the name of the list of artifacts")
        return text or None


Artifacts = list[Annotated[str, AfterValidator(_inside)] | ArtifactConfig]

_DEVICE = re.compile(r"(CON|PRN|AUX|NUL|CONIN\$|CONOUT\$|(?:COM|LPT)[1-9¹²³])", re.IGNORECASE)


class StepConfig(Section):
    """One of `[[steps]]`."""

    name: str
    """Name of the step's folder under steps/."""
    agent: AgentConfig = AgentConfig()
    verifier: VerifierConfig = VerifierConfig()
    min_reward: float | dict[str, float] | None = None
    """The steps after this one are run if its reward (each named reward) is at least this."""
    healthcheck: HealthcheckConfig | None = None
    artifacts: Artifacts = []

    @field_validator("name")
    @classmethod
    def _name_is_a_folder(cls, name: str) -> str:
        if (
            not name.strip()
            or name.endswith((".", " "))  # "." and ".." too
            or re.search(r'[<>:"/\\|?*\x00-\x1f\x7f]', name)
            or _DEVICE.fullmatch(name.partition(".")[0].rstrip(" "))
            or len(name.encode()) > 255
        ):
            raise ValueError(f"{name!r} is not a name of a folder on every system")
        return name


class TaskConfig(Section):
    """All of `task.toml`."""

    schema_version: str = "1.4"
    source: str | None = None
    multi_step_reward_strategy: Literal["mean", "final"] | None = None
    """How the rewards of steps become one; None is `mean`."""
    artifacts: Artifacts = []
    task: PackageInfo | None = None
    metadata: dict[str, Any] = {}
    agent: AgentConfig = AgentConfig()
    verifier: VerifierConfig = VerifierConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    solution: SolutionConfig = SolutionConfig()
    steps: list[StepConfig] | None = None

    @model_validator(mode="before")
    @classmethod
    def _version_was_renamed(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and "version" in data:
            data = dict(data)
            data.setdefault("schema_version", data.pop("version"))
        return data

    @field_validator("steps")
    @classmethod
    def _names_differ(cls, steps: list[StepConfig] | None) -> list[StepConfig] | None:
        names = [unicodedata.normalize("NFC", step.name).casefold() for step in steps or []]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"two steps have the name {min(twice)!r} (large and small letters are the same here)")
        return steps
