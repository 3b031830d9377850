"""The process that the embedded model runs in: llama.cpp's own HTTP server, by way of xllamacpp.

Started by `lachesis.inference.embedded`, by its path and not as part of the package, to load nothing but the model.
It reads one line of JSON from stdin, writes one line to stdout (`{"address": ...}` or `{"error": ...}`), and then waits
on stdin: the end of it, which the kernel brings about however the parent dies, is the end of this process.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import urllib.request
from typing import Any

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Serve until stdin ends."""
    if sys.platform == "linux":  # a fork of the parent may keep our stdin open: this holds even then
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides what ends
    report = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever llama.cpp prints goes to the log
    settings = json.loads(sys.stdin.readline())
    try:
        server = _serve(settings)
    except Exception as error:
        _report(report, {"error": f"{type(error).__name__}: {error}"})
        sys.exit(1)  # not at once: llama.cpp has yet to write the end of its log
    _report(report, {"address": server.listening_address})
    sys.stdin.read()
    os._exit(0)  # nothing to save, and tokens in the making are nobody's any more


def _report(stream: Any, line: dict[str, str]) -> None:
    stream.write(json.dumps(line) + "\n")
    stream.flush()


def _serve(settings: dict[str, Any]) -> Any:
    """A running server. A model whose own chat template ignores tools is loaded once more, with ours."""
    import xllamacpp

    server = xllamacpp.Server(_parameters(xllamacpp, settings, settings["template"]))
    if settings["template"] is None and not _knows_tools(server.listening_address):
        del server
        server = xllamacpp.Server(_parameters(xllamacpp, settings, settings["fallback_template"]))
    return server


def _knows_tools(address: str) -> bool:
    with urllib.request.urlopen(f"{address}/props", timeout=30) as answer:
        return bool(json.load(answer).get("chat_template_caps", {}).get("supports_tools"))


def _parameters(xllamacpp: Any, settings: dict[str, Any], template: str | None) -> Any:
    params = xllamacpp.CommonParams()
    params.model.path = settings["path"]
    params.model_alias = {settings["name"]}
    params.hostnames = ["127.0.0.1"]
    params.port = settings["port"]
    params.n_parallel = settings["parallel"]
    params.n_ctx = settings["context"] * settings["parallel"]  # the total, which llama.cpp divides among its slots
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = settings["threads"]
    params.cache_prompt = settings["prompt_cache"]
    if not settings["prompt_cache"]:
        params.cache_ram_mib = 0
    params.warmup = False
    params.ui = False
    params.verbosity = 2  # warnings
    params.use_jinja = True
    if template is not None:
        params.chat_template = template
    # llama.cpp answers 500 to tool calls that it cannot parse: it gives us the text, and we parse.
    params.force_pure_content_parser = True
    # What a client does not ask for does not happen: llama.cpp's own defaults are 40 / 0.95 / 0.05 / 0.8.
    sampling = params.sampling
    sampling.top_k, sampling.top_p, sampling.min_p, sampling.temp = 0, 1.0, 0.0, 1.0
    return params


if __name__ == "__main__":
    main()
