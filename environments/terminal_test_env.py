"""The smallest environment that looks into the sandbox: `python environments/terminal_test_env.py process`."""

from lachesis_envs.terminal_test import TerminalTestEnv

__all__ = ["TerminalTestEnv"]

if __name__ == "__main__":
    TerminalTestEnv.cli()
