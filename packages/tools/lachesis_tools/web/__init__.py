"""The tools `web_search` and `web_extract`, over a local corpus or a live provider."""

from lachesis_tools.web.corpus import Corpus
from lachesis_tools.web.provider import Provider, WebPage
from lachesis_tools.web.web_tools import provider_of, web_tools

__all__ = ["Corpus", "Provider", "WebPage", "provider_of", "web_tools"]
