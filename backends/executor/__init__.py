"""The sandbox's inner half: one process that runs commands and moves files for whoever holds its byte stream.

Standard library only, Python 3.8 or later. What is sent inside is one file, which `executor_code` joins from these
modules; it is started as `python3 -I -S executor.py` (as PID 1 where the sandbox has its own PID namespace). On its
command line:

  (nothing)        its standard input and output are the stream; the end of the stream is its end
  --dial PATH      it connects to the Unix socket PATH, and again after every cut
  --listen @NAME   it waits for connections to the abstract Unix socket NAME
  --listen fd:N    it waits for connections to the listening socket that it inherits as descriptor N
  --relay @NAME    no executor: copies its standard input and output to and from that socket, until either ends
  --bash PATH      the bash to use where none is on PATH
  FOLDER ...       are removed when it ends, unless it is PID 1

The protocol
------------
A frame is two big-endian 32-bit lengths, a JSON header, a binary payload: `!II`, header, payload.

* Every request has an `id` (a positive integer, never reused) and an `op`. Every request gets one answer with that
  `id`; answers come in any order. An error is `{"error": {"errno", "message", "path"}}`; without an `errno` it is the
  executor's own failure. `cancel`, `drop` and `shutdown` are no requests: they have no `id` and no answer.
* A message may be split over frames of one `id`; all but the last carry `"more": true`. (`write` upwards, `read` and
  `spilled` downwards: nothing large ever blocks the stream for the others.)
* Frames with `"id": 0` are about the stream itself. Unasked, it sends `{"id": 0, "hello": 2, "pid", "python"}` once it
  is ready for `init`, and `{"id": 0, "bye": reason}` when it ends of itself.

Requests, with what they carry, and their answers (`?` marks what may be null or left out; seconds, bytes):

  init       workdir, env, lifetime, wall_time?, grace?, memory?                     python?; comes first, once
  exec       command, timeout, cwd?, env?, stdin? (true: the payload), max_output,   as `ExecResult`; see below
             fresh? (true: the first variables and folder, and none of its changes)
  spilled    execution, stream ("stdout" or "stderr"), offset, limit                 payload
  start      command, cwd?, env?, terminal? ([rows, columns])                        process: its id
  processes                                                                          processes: [[id, command], ...]
  status     process                                                                 exit_code?, output_size
  output     process, offset, wait, limit                                            offset, exit_code?; payload
  input      process, close? (true: the end); payload                                {} when all of it is in the pipe
  kill       process                                                                 {}
  kill_all                                                                           {} when nothing else runs inside
  read       path, offset, limit?                                                    payload
  write      path; payload                                                           {}
  open       transfer: a number, never reused; kind, path                            {}
  pull       transfer                                                                end; payload (at most 256 KiB)
  push       transfer; payload (at most 256 KiB)                                     {} when there is room for more
  commit     transfer                                                                {} when all is in its place

  cancel     target: the id of a request; ends it, and its command
  drop       transfer; a file that is not committed is gone, of a folder what was unpacked stays
  shutdown

The payload of `exec`'s answer is stdout and then stderr; `stdout` in its header is the length of the former, and
`execution` is what `spilled` knows it by. Kinds of transfers: `read` and `write` are of a file, `pack` (pulled) and
`unpack` (pushed) of a folder's contents as a tar stream in GNU format, with files, folders and symbolic links.

`memory` is the limit of everything inside, if there is one. `wall_time` bounds every command, background ones included.

Sessions
--------
With `--dial` and `--listen` a stream may break and be replaced by another within `grace` seconds (at first 120; what
`init` says from then on); after that it ends. The one who holds the session is called near, the executor far.

1. far sends `{"id": 0, "hello": 2, "nonce": FAR, "fresh", "pid", "python"}`; `fresh` is true until somebody attached.
2. near sends `{"id": 0, "attach": 2, "nonce": NEAR, "received": n, "sealed": 0 or 1}` and, on a fresh one, `"token"`:
   32 random bytes in hex, which never travel again; else `"proof": P("near", FAR, NEAR, n, sealed)`.
3. far sends `{"id": 0, "attached": 2, "received": m, "proof": P("far", FAR, NEAR, n, sealed, m)}` and closes the stream
   that it had before, if that is still there.

P(words) is keyed BLAKE2b with 32 bytes of digest, in hex, the token being the key and the words, each as text, joined
by single spaces. Who fails is hung up on without a word, as is who sends more than 4096 bytes before it has succeeded.

Frames whose `id` is not 0 are numbered from 1 in each direction, without the number being written anywhere. n and m
are how many the side has received: the other one forgets these and sends all later ones again, so that each is
served once. Between attachments, `{"id": 0, "ack": n}` says the same, after 16 frames or 256 KiB at the latest; files
wait while more than 4 MiB are unacknowledged. `{"id": 0, "ack": n, "ping": true}` asks for an `ack`. A stream on which
nothing came for 5 minutes is closed.

Sealed, for streams that pass through a process which others inside may tamper with: every frame of either side after
the third step is followed by 16 bytes, keyed BLAKE2b of that size over the frame's number within this attachment and
direction (8 bytes, big-endian, from 0, `id` 0 included) and the whole frame; `person` is `near` or `far` after its
sender; the key is keyed BLAKE2b with 32 bytes of digest over `frames FAR NEAR`, the token being its key. A wrong tag
ends the stream.

Invariants
----------
* The stream and this process cannot be reached from inside: its fds are moved away and close-on-exec, and it is not
  dumpable, so that /proc/PID/fd, /proc/PID/mem and ptrace are closed even to the same uid.
* What is kept of a command's output in memory is bounded while it is read; of a truncated one the whole goes into a
  nameless file while there is room. Nothing that a command does blocks the loop.
* When the stream ends for good, or `lifetime` seconds are over, it ends, and everything that it started with it.
* The shell's state (folder, exported variables) is reported by an EXIT trap into a memory file of its own, never
  through the output. A shell that never reaches its trap leaves the remembered state as it was.
* When memory runs out, the kernel takes what runs inside, and not this process.
* Shells are started ahead of the commands that they will run. One that was killed or stopped before it began is
  replaced; one that has begun is not: a command runs once.
"""
