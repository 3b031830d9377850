"""The tools `browser_...`: a Chromium in the rollout's sandbox, driven by the program agent-browser."""

from lachesis_tools.browser.browser import Browser
from lachesis_tools.browser.browser_tools import BROWSER_TOOLS
from lachesis_tools.browser.program import check_browser_requirements

__all__ = ["BROWSER_TOOLS", "Browser", "check_browser_requirements"]
