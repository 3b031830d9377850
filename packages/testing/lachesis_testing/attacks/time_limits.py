"""Time limits: what a command does to outlive its limit."""

from __future__ import annotations

import asyncio
import contextlib

from .attack import AttackTarget, Family, Fell, Held, Run, Verdict, mark
from .probes import host_processes, stopped

time_limits = Family("time", is_executors=True)

RUNAWAYS = {
    "foreground": "sleep {mark}",
    "background": "sleep {mark} & wait",
    "own session": "setsid sleep {mark} & wait; sleep {mark}",
    "double fork": "(setsid bash -c 'setsid sleep {mark} & disown; exit' &); sleep {mark}",
    "deaf to TERM": "trap '' TERM INT HUP; (trap '' TERM INT HUP; sleep {mark}); sleep {mark}",
    "respawning": "while true; do sleep {mark}; done",
    "forking": "while true; do (sleep {mark} & sleep {mark} & ); sleep 0.01; done",
    "exec": "setsid sleep {mark} & exec sleep {mark}",
    "stopped": "kill -STOP $$; sleep {mark}",
    "stopped children": "for i in 1 2 3; do sleep {mark} & kill -STOP $!; done; sleep {mark}",
    "output closed": "exec >&- 2>&- <&-; setsid sleep {mark} & sleep {mark}",
    "output given away": "setsid sleep {mark} < /dev/null > /dev/null 2>&1 & sleep {mark}",
    "daemon": (
        "python3 -c 'import os,time\nif os.fork()==0:\n os.setsid()\n if os.fork()==0:\n  time.sleep({mark})\n"
        " os._exit(0)\ntime.sleep({mark})'"
    ),
}
"""Commands that write nothing, start processes with `{mark}` in their command line and do not end."""

SURVIVORS = "for f in /proc/[0-9]*/cmdline; do tr '\\0' ' ' < $f; echo; done 2>/dev/null | grep -c '[ (]{mark}'"


def runaway(command: str) -> Run:
    """The attack of a command that outlives its limit: it writes nothing, and `{mark}` is in its command lines."""

    async def run(target: AttackTarget) -> Verdict:
        sandbox, name = target.sandbox, mark()
        bystander = await sandbox.start("sleep 1000")
        result = await stopped(sandbox, f"echo begun; cd /; {command.format(mark=name)}", 0.4)
        if (result.exit_code, result.timed_out, result.stdout) != (124, True, b"begun\n"):
            return Fell(f"the result of a command that ran out of time is {result}")
        hidden = SURVIVORS.replace("{mark}", name[:5] + "[" + name[5] + "]" + name[6:])
        survivors = await sandbox.exec(hidden, timeout=30)
        if survivors.stdout != b"0\n" or host_processes(name):
            await sandbox.stop_processes()
            return Fell(f"{survivors.stdout.decode().strip()} processes live on")
        if (await bystander.status()).exit_code is not None:
            return Fell("a process of another command was killed with it")
        await bystander.kill()
        if (await sandbox.exec("pwd", timeout=30)).stdout.decode().strip() != sandbox.workdir:
            return Fell("it changed the folder of later commands")
        return Held()

    return run


for _name, _command in RUNAWAYS.items():
    time_limits.attack(_name, _command.partition("\n")[0].replace("{mark}", "N"))(runaway(_command))


@time_limits.attack("cancelled", "go on after the owner has cancelled the command")
async def cancelled(target: AttackTarget) -> Verdict:
    sandbox, name = target.sandbox, mark()
    command = f"touch began-{name}; setsid sleep {name} & sleep {name}; touch survived-{name}"
    task = asyncio.create_task(sandbox.exec(command, timeout=100))
    await sandbox.exec(f"until test -e began-{name}; do sleep 0.02; done", timeout=60)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    hidden = SURVIVORS.replace("{mark}", name[:5] + "[" + name[5] + "]" + name[6:])
    left = ""
    for _ in range(50):
        left = (await sandbox.exec(f"{hidden}; ls -d survived-{name} 2> /dev/null", timeout=30)).stdout.decode().strip()
        if left == "0":
            return Held()
        await asyncio.sleep(0.1)
    return Fell(f"it lives on: {left}")


@time_limits.attack("waiting shells stopped", "stop the shells that wait for the next commands (SIGSTOP)")
async def shells_stopped(target: AttackTarget) -> Verdict:
    return await _with_shells(target, "STOP")


@time_limits.attack("waiting shells killed", "kill the shells that wait for the next commands")
async def shells_killed(target: AttackTarget) -> Verdict:
    return await _with_shells(target, "KILL")


async def _with_shells(target: AttackTarget, signal: str) -> Verdict:
    await target.needs_own_processes()
    waiting = f"for p in $(cat /proc/1/task/1/children); do test $p = $$ || kill -{signal} $p; done"
    for number in range(3):
        await target.sandbox.exec(waiting, timeout=30)
        result = await target.sandbox.exec(f"echo {number}; exit {number}", timeout=30)
        if (result.exit_code, result.stdout) != (number, b"%d\n" % number):
            return Fell(f"the next command gave {result}")
        if result.duration > 5:
            return Fell(f"the next command took {result.duration:.0f} s")
    return Held()
