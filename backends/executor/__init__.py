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

PROTOCOL.md, beside this file, describes what it and its owner say to each other.
"""
