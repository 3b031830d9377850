"""One tool call, for a first success in training: `python environments/tool_call_env.py evaluate`."""

from lachesis_envs.tool_call import ToolCallEnv

__all__ = ["ToolCallEnv"]

if __name__ == "__main__":
    ToolCallEnv.cli()
