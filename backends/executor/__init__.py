"""The executor: one process inside a sandbox that runs commands and moves files for the owner of its byte stream.

It uses the standard library only and runs on Python 3.8 or later. `executor_code` joins these modules into one file,
which is started inside as `python3 -I -S executor.py`, as PID 1 where the sandbox has a PID namespace. Arguments:

  (none)           standard input and output are the stream; the executor ends when the stream ends
  --dial PATH      connect to the Unix socket PATH, and again after every cut
  --listen @NAME   wait for connections to the abstract Unix socket NAME
  --listen fd:N    wait for connections to the listening socket inherited as descriptor N
  --relay @NAME    run no executor: copy standard input and output to and from that socket until either ends
  --bash PATH      the bash of `fresh` commands, alone in a folder that nothing inside can write; also if PATH has none
  --group KIND:N   start commands in this control group, by an inherited descriptor: `folder` of its folder, `tasks` of
                   its file of that name, in version 1
  FOLDER ...       folders to remove at the end, unless this is PID 1

The protocol
------------
A frame is two big-endian 32-bit lengths (`!II`), a JSON header and a binary payload.

* A request has an `id` (a positive integer, never reused) and an `op`. Every request gets one answer with that `id`, in
  any order. An error is `{"error": {"errno", "message", "path"}}`; without an `errno` it is a failure of the executor
  itself. `cancel`, `drop` and `shutdown` have no `id` and no answer.
* An answer to `read` or `spilled` may be split over frames, so that nothing large blocks the stream for others; all but
  the last carry `"more": true`.
* Frames with `"id": 0` concern the stream itself. The executor sends `{"id": 0, "hello": 2, "pid", "python"}` when it
  is ready for `init`, and `{"id": 0, "bye": reason}` when it ends by itself.

Requests, their fields, and their answers (`?` marks optional fields; times in seconds, sizes in bytes):

  init       workdir, env, lifetime, wall_time?, grace?, memory?, cpus?              python?, unfiltered; first, once
  exec       command, timeout, cwd?, env?, stdin? (true: the payload), max_output,   as `ExecResult`; see below
             fresh? (true: use the initial variables and folder, discard all changes,
             and run the bash of `--bash`, whose folder comes first in PATH)
  waited                                                                             waited?
  spilled    execution, stream ("stdout" or "stderr"), offset, limit                 payload
  start      command, cwd?, env?, terminal? ([rows, columns])                        process: its id
  processes                                                                          processes: [[id, command], ...]
  status     process                                                                 exit_code?, output_size
  output     process, offset, wait, limit                                            offset, exit_code?; payload
  input      process, close? (true: then close it); payload                          {} when all of it is in the pipe
  kill       process                                                                 {}
  kill_all                                                                           {} when nothing else runs inside
  read       path, offset, limit?                                                    payload
  write      path, mode?; payload (at most 256 KiB)                                  {}
  stat       path                                                                    path: without links; mode?, size?
  open       transfer: a number, never reused; kind, path, most? (members of         {}
             `pack`), mode? (of a file)
  pull       transfer                                                                end; payload (at most 256 KiB)
  push       transfer; payload (at most 256 KiB)                                     {} when there is room for more
  commit     transfer                                                                {} when all is in its place
  listen     transfer                                                                port: on 127.0.0.1 inside
  accept     transfer, listener: the transfer of `listen`                            refused; see below

  cancel     target: the id of a request; ends it and its command
  drop       transfer; removes an uncommitted file, keeps what was unpacked of a folder, resets an uncommitted
             connection, closes a listening socket with all its connections
  shutdown

The payload of an `exec` answer is stdout followed by stderr; `stdout` in its header is the length of the former, and
`execution` identifies the command for `spilled`. Kinds of transfers: `read` and `write` move a file; `pack` (pulled)
and `unpack` (pushed) move a folder's contents as a tar stream in GNU format of files, folders and symbolic links, with
paths of at most 4095 bytes and 256 folders in each other.

`accept` is answered when a program inside has connected, and its transfer is then that connection: `pull` is answered
with what has arrived (at most 64 KiB, `end` at the end), `push` when all of it is in the socket, `commit` ends the
outgoing half. At most 256 connections exist at once; `refused` is how many others have been reset so far.

`unfiltered` is why an executor that is PID 1 could install no filter of system calls; empty when it has one.
`memory` and `cpus` are limits of the sandbox, if it has them. `waited` is how long `fresh` commands waited for a
processor, in all; see `Waiting`. `wall_time` bounds every command, background ones included.

Sessions
--------
With `--dial` and `--listen`, another stream may replace a broken one within `grace` seconds (120 before `init`), after
which the executor ends. In the protocol, the owner is called near and the executor far.

1. far sends `{"id": 0, "hello": 2, "nonce": FAR, "fresh", "pid", "python"}`; `fresh` is true before any attachment.
2. near sends `{"id": 0, "attach": 2, "nonce": NEAR, "received": n, "sealed": 0 or 1}` and, when `fresh`, `"token"`: 32
   random bytes in hex, which are never sent again; else `"proof": P("near", FAR, NEAR, n, sealed)`.
3. far sends `{"id": 0, "attached": 2, "received": m, "proof": P("far", FAR, NEAR, n, sealed, m)}` and closes the
   previous stream, if it is still open.

P(words) is keyed BLAKE2b with a digest of 32 bytes, in hex. The token is the key; the message is the words as text,
joined by single spaces. A peer that fails, or sends more than 4096 bytes before it has succeeded, is disconnected
without a message.

Frames with an `id` other than 0 are numbered from 1 in each direction; the number is not sent. n and m count the frames
that a side has received. The other side forgets these and sends all later ones again, so each frame is served once.
Between attachments `{"id": 0, "ack": n}` says the same, after 16 frames or 256 KiB at the latest; files wait while
more than 4 MiB are unacknowledged. `{"id": 0, "ack": n, "ping": true}` requests an `ack`. A stream that carries nothing
for 5 minutes is closed.

A stream that passes through a process which others inside may tamper with is sealed: after step 3, 16 bytes follow
every frame of either side. They are keyed BLAKE2b over the frame's number within this attachment and direction (8
bytes, big-endian, from 0, including frames with `id` 0) and the whole frame; `person` is `near` or `far`, the sender.
The key is keyed BLAKE2b with a digest of 32 bytes over `frames FAR NEAR`, with the token as its key. A wrong tag ends
the stream.

Invariants
----------
* Nothing inside reaches the stream or this process: its descriptors are high and close-on-exec, and it is not dumpable,
  which closes /proc/PID/fd, /proc/PID/mem and ptrace even to the same user.
* The part of a command's output that is kept in memory is bounded while it is read; the whole of a truncated output
  goes into a file in memory while there is room. No command blocks the loop.
* When the stream ends for good, or `lifetime` is over, the executor ends with everything that it started.
* An EXIT trap reports the shell's state (folder, exported variables) into a memory file, never through the output. A
  shell that does not reach its trap leaves the state unchanged.
* When memory runs out, the kernel kills commands and not this process.
* A prewarmed shell that is killed or stopped before it begins its command is replaced; one that has begun is not. A
  command runs once.
"""
