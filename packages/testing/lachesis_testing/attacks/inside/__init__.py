"""Programs of attacks that run inside a sandbox: the standard library of Python 3.8, one file a family.

Each function is one attack, and the first line of its docstring says what it tries. It raises `WallFell` with what it
reached, or `NothingToAttack`. If it returns, or the kernel refuses it with an `OSError`, the wall held. Nothing is
changed where there is no wall: calls that would change the machine get arguments that are refused after the check of
permission. `harness` runs them, each in a process of its own.
"""
