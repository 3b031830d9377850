"""The process of the embedded model: llama.cpp's HTTP server, through xllamacpp.

`lachesis_tokens.engines.embedded` starts this file by its path, not as part of the package, so that it loads only the
model. It reads one line of JSON from stdin, writes one line to stdout (`{"address": ...}` or `{"error": ...}`), and
then waits for the end of stdin. The kernel closes stdin however the parent dies, and this process ends.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from typing import Any

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Serve until stdin ends."""
    if sys.platform == "linux":  # also if a fork of the parent keeps stdin open
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides what ends
    report = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # llama.cpp's output goes to the log
    settings = json.loads(sys.stdin.readline())
    try:
        server = _server(settings)
    except Exception as error:
        _report(report, {"error": f"{type(error).__name__}: {error}"})
        sys.exit(1)  # not os._exit: llama.cpp still writes the end of its log
    _report(report, {"address": server.listening_address})
    sys.stdin.read()
    os._exit(0)  # nothing to save


def _report(stream: Any, line: dict[str, str]) -> None:
    stream.write(json.dumps(line) + "\n")
    stream.flush()


def _server(settings: dict[str, Any]) -> Any:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = settings["path"]
    params.lora_adapters = list(map(xllamacpp.CommonAdapterLoraInfo, settings["adapters"]))
    params.model_alias = {settings["name"]}
    params.hostnames = ["127.0.0.1"]
    params.api_keys = [settings["api_key"]]  # its port is open to every user and to web pages
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
    if settings["template"] is not None:
        params.chat_template = settings["template"]
    # llama.cpp answers 500 to tool calls that it cannot parse, so it returns the text and our parser reads it.
    params.force_pure_content_parser = True
    # Samplers are off unless a request sets them: llama.cpp's defaults are 40 / 0.95 / 0.05 / 0.8.
    sampling = params.sampling
    sampling.top_k, sampling.top_p, sampling.min_p, sampling.temp = 0, 1.0, 0.0, 1.0
    return xllamacpp.Server(params)


if __name__ == "__main__":
    main()
