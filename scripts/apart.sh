#!/bin/sh
# Run a command in PID, mount, network and IPC namespaces with a /tmp, /run and /dev/shm of its own: scripts/apart.sh COMMAND...
#
# Tests look for processes, mounts and folders that sandboxes leave on the machine. Two of these commands do not see each
# other's. Only root may make such namespaces. The folder that was /tmp is removed afterwards.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
mkdir -m 1777 "$folder/tmp" # on the disk, since files in memory count towards a sandbox's memory

# A project below /tmp stays where it is.
unshare --pid --fork --kill-child --mount-proc --mount --net --ipc sh -c '
  set -e
  case $PWD in /tmp/*) mkdir -p "$1${PWD#/tmp}" && mount --bind "$PWD" "$1${PWD#/tmp}" ;; esac
  mount --rbind "$1" /tmp
  cd "$PWD"
  mount -t tmpfs -o mode=755 run /run
  mount -t tmpfs -o mode=1777 shm /dev/shm
  mkdir -p /run/lock /run/sshd
  ip link set lo up
  shift
  set +e
  "$@" # not exec: the shell stays process 1, and reaps what loses its parent
  exit "$?"' sh "$folder/tmp" "$@"
