"""Notes each use of the network by a Python process, and refuses it while a file says so.

The audit puts this folder on PYTHONPATH, so that every interpreter which an environment starts has it. Addresses of
this machine are left out. Standard library only, and any version of Python 3.
"""

import json
import os
import re
import sys
import time

_LOG = os.environ.get("LACHESIS_AUDIT_LOG")
_BLOCK = os.environ.get("LACHESIS_AUDIT_BLOCK", "")
_FETCH = re.compile(
    r"\b(curl|wget|git (clone|fetch|pull)|pip3? (install|download)|npm (i|install)|apt(-get)? (install|update)"
    r"|docker pull|huggingface-cli|hf download|uv pip install|conda install)\b"
)


def _here(host):
    host = str(host or "localhost")
    return host in ("localhost", "::1", "0.0.0.0", "::", "") or host.startswith(("127.", "::ffff:127."))


def _note(event, what):
    refused = bool(_BLOCK) and os.access(_BLOCK, os.F_OK)
    line = json.dumps({"time": time.time(), "pid": os.getpid(), "event": event, "what": what[:200], "refused": refused})
    handle = os.open(_LOG, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(handle, line.encode() + b"\n")
    finally:
        os.close(handle)
    if refused:
        raise ConnectionRefusedError(111, "refused by the audit: " + what[:200])


def _hook(event, args):
    if event == "socket.connect":
        address = args[1]
        if isinstance(address, tuple) and not _here(address[0]):
            _note("connect", "{}:{}".format(*address[:2]))
    elif event == "socket.getaddrinfo":
        host = args[0].decode("ascii", "replace") if isinstance(args[0], bytes) else args[0]
        if not _here(host) and not re.fullmatch(r"[0-9.]+|[0-9a-f:]*:[0-9a-f:]*", str(host)):
            _note("resolve", str(host))
    elif event in ("subprocess.Popen", "os.system", "os.posix_spawn", "os.exec"):
        parts = args[1] if len(args) > 1 else args[0]
        parts = parts if isinstance(parts, (list, tuple)) else [parts]
        command = " ".join(each.decode("utf-8", "replace") if isinstance(each, bytes) else str(each) for each in parts)
        found = _FETCH.search(command)
        if found:
            _note("download", command)


if _LOG:
    sys.addaudithook(_hook)
