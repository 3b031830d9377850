"""Runs one script, whose module `tools` has a function for each tool. `execute_code` reads it as text; Python >= 3.8.

Lines of JSON: on the original stdin `{"code", "tools"}` (the parameters by name of the function, with the name of the
tool first), then `{"number", "value"}` or `{"number", "error"}` for each call, in their order. On the original stdout
`{"output"}`, the file that has what the script prints, then `{"call", "arguments", "number"}`.
"""

import contextlib
import functools
import itertools
import json
import linecache
import os
import sys
import tempfile
import threading
import traceback
import types


def main() -> None:
    answers = os.fdopen(os.dup(0), "r", encoding="utf-8")
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    given = json.loads(answers.readline())
    output, path = tempfile.mkstemp(prefix="execute_code-")
    for descriptor, place in ((os.open(os.devnull, os.O_RDONLY), 0), (output, 1), (output, 2)):
        os.dup2(descriptor, place)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(  # type: ignore[union-attr]
            encoding="utf-8", errors="backslashreplace", write_through=True
        )
    print(json.dumps({"output": path}), file=channel, flush=True)
    lock, owner, numbers = threading.Lock(), os.getpid(), itertools.count()
    failed = type("ToolError", (Exception,), {"__module__": "tools"})

    def call(name, parameters, *values, **named):  # type: ignore[no-untyped-def]
        if os.getpid() != owner:
            raise RuntimeError("only the process of the script itself can call tools")
        if len(values) > len(parameters):
            raise TypeError(f"{name}() takes {', '.join(parameters) or 'no arguments'}")
        arguments = {**dict(zip(parameters, values)), **named}  # noqa: B905
        with lock:
            number = next(numbers)
            # A script may give up on a call, by an alarm: it may have written a part of a line, and read one of the
            # answer, which is still to come.
            request = json.dumps({"call": name, "arguments": arguments, "number": number})
            print("\n" + request, file=channel, flush=True)
            while True:
                line = answers.readline()
                if not line:
                    raise EOFError("nobody answers calls any more")
                with contextlib.suppress(ValueError):
                    answer = json.loads(line)
                    if answer["number"] == number:
                        break
        if "error" in answer:
            raise failed(answer["error"])
        return answer["value"]

    tools = types.ModuleType("tools")
    tools.ToolError = failed  # type: ignore[attr-defined]
    for function, (name, *parameters) in given["tools"].items():
        setattr(tools, function, functools.partial(call, name, parameters))
    sys.modules["tools"] = sys.modules["hermes_tools"] = tools
    code, module = given["code"], types.ModuleType("__main__")
    sys.modules["__main__"], sys.argv = module, ["script"]
    linecache.cache["<script>"] = (len(code), None, [line + "\n" for line in code.split("\n")], "<script>")
    try:
        exec(compile(code, "<script>", "exec"), module.__dict__)
    except Exception as error:
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename != "<script>":
            frames = frames.tb_next
        traceback.print_exception(type(error), error, frames)
        sys.exit(1)


if __name__ == "__main__":
    main()
