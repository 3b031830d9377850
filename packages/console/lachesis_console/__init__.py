"""Commands of people at a terminal, the checks of environments that they show, and an agent to talk to.

from lachesis_console import AIAgent
"""

from typing import TYPE_CHECKING

from backends.lazy import lazy_names

if TYPE_CHECKING:
    from lachesis_console.agent.ai_agent import AIAgent
    from lachesis_console.agent.session import AgentEvents, AgentSession
else:
    __getattr__ = lazy_names(
        __name__,
        {
            "lachesis_console.agent.ai_agent": ["AIAgent"],
            "lachesis_console.agent.session": ["AgentEvents", "AgentSession"],
        },
    )

__all__ = ["AIAgent", "AgentEvents", "AgentSession"]
