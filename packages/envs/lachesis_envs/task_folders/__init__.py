"""Tasks in Harbor's folder format: settings, reader, writer, and other formats that become such folders."""

from .config import EnvironmentConfig, StepConfig, TaskConfig
from .errors import TaskError, TaskProblem
from .reading import find_tasks, parse_config
from .rows import create_row_task, row_name
from .task import Step, Task
from .terminal_bench import read_task
from .writing import create_task, to_toml, write_task

__all__ = [
    "EnvironmentConfig",
    "Step",
    "StepConfig",
    "Task",
    "TaskConfig",
    "TaskError",
    "TaskProblem",
    "create_row_task",
    "create_task",
    "find_tasks",
    "parse_config",
    "read_task",
    "row_name",
    "to_toml",
    "write_task",
]
