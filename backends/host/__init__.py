"""Sandboxes made of processes of one machine: of this one (near), or of one that ssh reaches (far).

The same modules run on both sides. A far machine gets them as a zip file (`program`) and runs them with its own Python,
so these use the standard library alone, and Python 3.8 or later. Of the project they import `backends.errors`,
`backends.executor_code`, `backends.first_use` and `backends.executor`.

  machine        what this machine can do, and what a sandbox is started from
  bubblewrap     which bwrap works, its command line, and what is hidden of /proc
  cgroups        limits of processors, memory and processes
  runtime        Python and bash that run inside any root file system; `copying` and `elf` make the copies
  folders        private folders, cached folders, and what is removed with a sandbox
  starting       from fork to exec: cgroup, disk, descriptors, limits; or from fork to a prepared executor inside
  kernel         what that asks of the kernel

Near, `sandboxes` drives them from an event loop, with `spawner` (whose helper process, `spawn_server`, forks) and
`records` (what a killed owner has left). Far, `hub` answers the requests of one ssh session, and forks a `supervisor`
for each sandbox.
"""
