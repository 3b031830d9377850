"""Kernel surface: calls that ordinary programs do not need and that ways out of sandboxes have used."""

from __future__ import annotations

from .attack import Family
from .inside import kernel
from .time_limits import runaway

kernel_surface = Family("kernel")
kernel_surface.programs(kernel)

ORPHANS = (
    "exec python3 -c 'import ctypes,os,time\nctypes.CDLL(None).prctl(36,0,0,0,0)\nif os.fork()==0:\n os.setsid()\n"
    " if os.fork()==0:\n  time.sleep({mark})\n os._exit(0)\ntime.sleep({mark})'"
)
"""A program in the shell's place that no longer adopts orphans (PR_SET_CHILD_SUBREAPER): they leave its tree."""
kernel_surface.attack(
    "orphans", "outlive a time limit in an orphan, which the shell no longer adopts (prctl)", is_executors=True
)(runaway(ORPHANS))
