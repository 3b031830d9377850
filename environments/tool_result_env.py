"""An answer that only a tool knows: `python environments/tool_result_env.py evaluate`."""

from lachesis_envs.tool_call import ToolResultEnv

__all__ = ["ToolResultEnv"]

if __name__ == "__main__":
    ToolResultEnv.cli()
