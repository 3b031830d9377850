"""The relay: it copies a byte stream to and from a Unix socket."""

from __future__ import annotations


def relay(address: str, silence: float = 1e9, patience: float = 0.0) -> None:
    """Copy standard input to the Unix socket `address`, and what comes from there to standard output.

    It ends with either, or after `silence` seconds without any input. Writes may block: neither side stops reading.
    For `patience` seconds, a socket that nobody listens at yet is not an error. Everything is imported here, because
    `backends.modal` sends this function without its module.
    """
    import ctypes
    import os
    import select
    import socket
    import time

    ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE
    with socket.socket(socket.AF_UNIX) as far:
        until = time.monotonic() + patience
        while error := far.connect_ex(address):
            if time.monotonic() >= until:
                raise OSError(error, os.strerror(error), address)
            time.sleep(0.02)
        end = time.monotonic() + silence
        while time.monotonic() < end:
            ready, _, _ = select.select([0, far.fileno()], [], [], max(0.0, end - time.monotonic()))
            if 0 in ready:
                data = os.read(0, 1 << 18)
                if not data:
                    return
                far.sendall(data)
                end = time.monotonic() + silence
            if far.fileno() in ready:
                data = far.recv(1 << 18)
                if not data:
                    return
                while data:
                    data = data[os.write(1, data) :]
