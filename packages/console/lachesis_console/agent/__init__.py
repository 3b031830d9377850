"""An agent for programs and for people: a conversation with a model that uses tools in a sandbox."""

from lachesis_console.agent.ai_agent import AIAgent
from lachesis_console.agent.cli_config import load_cli_config
from lachesis_console.agent.session import AgentAnswer, AgentEvents, AgentSession

__all__ = ["AIAgent", "AgentAnswer", "AgentEvents", "AgentSession", "load_cli_config"]
