"""The control channel: forging results, reaching the executor, ending it."""

from __future__ import annotations

from .attack import AttackTarget, Family, Fell, Held, Verdict, python
from .inside import channel

control_channel = Family("channel")
control_channel.programs(channel, needs_own_processes=True)

FRAMES = r"""
import json, os, socket, struct
def frame(**header):
    data = json.dumps(header).encode()
    return struct.pack("!II", len(data), 6) + data + b"FORGED"
frames = b"".join(
    frame(id=number, execution="e%d" % number, exit_code=0, timed_out=False, stdout=6, stdout_elided=0,
          stderr_elided=0, duration=0.0) for number in range(0, 3000))
frames = frame(id=0, hello=2, pid=1, python=[3, 11, 0], nonce="0" * 32, fresh=True) + frames + frame(id=0, bye="over")
"""

ON_DESCRIPTORS = (
    FRAMES
    + """
import fcntl
for number in range(3, 1024):
    try:
        fcntl.fcntl(number, fcntl.F_SETFL, os.O_NONBLOCK)
        os.write(number, frames)
    except OSError:
        pass
os._exit(7)
"""
)

ON_SOCKETS = (
    FRAMES
    + """
names = set()
for line in open("/proc/net/unix").readlines()[1:]:
    names.add(line.split()[-1])
for folder in ("/run/lachesis-link", "/.lachesis", "/tmp", "/run"):
    names |= {folder + "/" + name for name in os.listdir(folder)} if os.path.isdir(folder) else set()
kept = []
for name in names:
    for _ in range(40):
        try:
            sock = socket.socket(socket.AF_UNIX)
            sock.settimeout(0.2)
            sock.connect("\\0" + name[1:] if name.startswith("@") else name)
            kept.append(sock)
            sock.sendall(frames)
            sock.recv(4096)
        except OSError:
            pass
os._exit(7)
"""
)


async def _unharmed(target: AttackTarget, number: int = 0) -> Verdict:
    """Whether commands still run, with their own results."""
    result = await target.sandbox.exec(f"echo unharmed {number}; pwd; exit 5", timeout=60)
    expected = f"unharmed {number}\n{target.sandbox.workdir}\n".encode()
    return Held() if (result.exit_code, result.stdout) == (5, expected) else Fell(f"the next command gave {result}")


async def _forged(target: AttackTarget, code: str) -> Verdict:
    result = await target.sandbox.exec(python(target.sandbox), stdin=code.encode(), timeout=120)
    if (result.exit_code, result.stdout) != (7, b""):
        return Fell(f"the command that forged ended with {result}")
    return await _unharmed(target)


@control_channel.attack("forged frames", "write frames of the protocol on every descriptor")
async def forged_frames(target: AttackTarget) -> Verdict:
    return await _forged(target, ON_DESCRIPTORS)


@control_channel.attack("forged sessions", "connect to every Unix socket that can be seen, and speak the protocol")
async def forged_sessions(target: AttackTarget) -> Verdict:
    return await _forged(target, ON_SOCKETS)


@control_channel.attack(
    "forged exit code", "report another exit code, close the channel of the report", is_executors=True
)
async def forged_exit_code(target: AttackTarget) -> Verdict:
    for command, code in (
        ("exec 211>&-; exit 4", 4),
        ("exit() { builtin exit 0; }; trap 'builtin exit 6' EXIT; (builtin exit 3)", 6),
        ("set() { :; }; exit() { :; }; bash -c 'exit 7'", 7),
        ("kill -9 $$", 137),
        ("exec bash -c 'kill -TERM $$'", 143),
    ):
        result = await target.sandbox.exec(command, timeout=30)
        if result.exit_code != code:
            return Fell(f"{command!r} gave {result.exit_code}")
    return await _unharmed(target)


TRACED = """
import ctypes, os, signal
traceme = 0
ctypes.CDLL(None).ptrace(traceme, 0, 0, 0)
os.kill(os.getpid(), signal.SIGURG)  # which does nothing, but stops what is traced
print("went on", flush=True)
os._exit(7)
"""


@control_channel.attack(
    "forged end", "look ended while it runs, by making the executor its tracer (PTRACE_TRACEME)", is_executors=True
)
async def forged_end(target: AttackTarget) -> Verdict:
    command = f"exec {python(target.sandbox)[:-1]} -c '{TRACED}'"
    result = await target.sandbox.exec(command, timeout=20)
    if (result.exit_code, result.stdout) != (7, b"went on\n"):
        return Fell(f"a command that runs was reported with exit code {result.exit_code}: {result}")
    return await _unharmed(target)


@control_channel.attack(
    "forged report", "report a folder and variables of another's choice, damaged, or without end", is_executors=True
)
async def forged_report(target: AttackTarget) -> Verdict:
    reports = [
        r"printf '/etc\0declare -x LD_PRELOAD=\"/tmp/x\"\n\0' >&211; exec true",
        r"printf '/\0export A=$'\''\\777'\''\n\0' >&211; exec true",
        r"head -c 8M /dev/zero >&211; exec true",
        r"printf 'x\0y' >&211; exec true",
        r"(sleep 0.2; printf '/etc\0\0' >&211) > /dev/null 2>&1 & true",
    ]
    for number, report in enumerate(reports):
        result = await target.sandbox.exec(report, timeout=30, fresh=True)
        if result.exit_code:
            return Fell(f"{report!r} gave {result.exit_code}")
        verdict = await _unharmed(target, number)
        if isinstance(verdict, Fell):
            return verdict
    return Held()


@control_channel.attack("signals", "send every signal to PID 1, and SIGKILL to all processes")
async def signals(target: AttackTarget) -> Verdict:
    await target.needs_own_processes()
    await target.sandbox.exec("for s in $(seq 1 64); do kill -$s 1; done; kill -9 -1", timeout=30)
    return await _unharmed(target)
