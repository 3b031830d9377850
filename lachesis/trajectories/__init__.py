"""Records of rollouts: messages and their history, token samples, trajectory files.

    history = MessageHistory([{"role": "user", "content": "Which Python is installed?"}])
    history.append(response)                                # a dict, a Message, a ChatResponse or a ToolResponse
    conversion = to_conversations(history, tools)           # ShareGPT turns, and warnings
    save_trajectory(conversion, model="...", completed=True)

A leaf of the project: it imports no other package of it. `exports` and `builtin_exports` are imported separately.
"""

from typing import TYPE_CHECKING

from lachesis.lazy import lazy_names
from lachesis.trajectories.editing import StaleMessage
from lachesis.trajectories.entries import (
    load_trajectories,
    save_trajectory,
    to_batch_entry,
    to_dataset_entry,
    to_trajectory_entry,
)
from lachesis.trajectories.errors import (
    DuplicateCallId,
    MalformedMessage,
    MessageError,
    RoleOrder,
    UnansweredToolCall,
    UnexpectedToolResult,
    UnknownRole,
)
from lachesis.trajectories.history import MessageHistory
from lachesis.trajectories.jsonl import JsonlError, JsonlWriter, append_line, read_lines
from lachesis.trajectories.markup import convert_scratchpad_to_think
from lachesis.trajectories.message_rules import validate_messages
from lachesis.trajectories.messages import ChatResponse, FinishReason, Message, ToolCall, ToolResponse, Usage
from lachesis.trajectories.nodes import Node
from lachesis.trajectories.sampling_record import sampling_problem
from lachesis.trajectories.sharegpt import WarningKind, system_prompt, to_conversations
from lachesis.trajectories.split_rollouts import LARGEST_REWARD
from lachesis.trajectories.tokens import MASKED, MASKED_LOGPROB, SampledTokens, TokenPrefix, digest_of

if TYPE_CHECKING:
    from lachesis.trajectories.loading import from_sharegpt, tools_from_sharegpt
else:  # a run without tokens needs none of it
    __getattr__ = lazy_names(
        __name__,
        {
            "lachesis.trajectories.loading": (
                "from_sharegpt",
                "tools_from_sharegpt",
            ),
        },
    )

__all__ = [
    "LARGEST_REWARD",
    "MASKED",
    "MASKED_LOGPROB",
    "ChatResponse",
    "DuplicateCallId",
    "FinishReason",
    "JsonlError",
    "JsonlWriter",
    "MalformedMessage",
    "Message",
    "MessageError",
    "MessageHistory",
    "Node",
    "RoleOrder",
    "SampledTokens",
    "StaleMessage",
    "TokenPrefix",
    "ToolCall",
    "ToolResponse",
    "UnansweredToolCall",
    "UnexpectedToolResult",
    "UnknownRole",
    "Usage",
    "WarningKind",
    "append_line",
    "convert_scratchpad_to_think",
    "digest_of",
    "from_sharegpt",
    "load_trajectories",
    "read_lines",
    "sampling_problem",
    "save_trajectory",
    "system_prompt",
    "to_batch_entry",
    "to_conversations",
    "to_dataset_entry",
    "to_trajectory_entry",
    "tools_from_sharegpt",
    "validate_messages",
]
