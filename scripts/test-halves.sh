#!/bin/sh
# Run pytest on two sets of tests at the same time: scripts/test-halves.sh PYTEST "TESTS" "OTHER TESTS"
#
# Both sets look for processes, mounts and folders that sandboxes leave on the machine, so each gets PID, mount, network
# and IPC namespaces with a /tmp, /run and /dev/shm of its own. Without the right to make namespaces (that is, unless
# root runs this), the sets run one after the other.
set -u
pytest=$1 first=$2 second=$3
log=$(mktemp) folders=$(mktemp -d)
trap 'rm -rf "$log" "$folders"' EXIT

apart() { # FOLDER COMMAND...: /tmp is a folder on the disk, since files in memory count towards a sandbox's memory.
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
    exit "$?"' sh "$@"
}

mkdir -m 1777 "$folders/1" "$folders/2"
# shellcheck disable=SC2086 # lists of words
if apart "$folders/1" true 2>/dev/null; then
  echo "two sets of tests run at the same time; $second is shown when it ends"
  apart "$folders/2" "$pytest" --durations=10 $second >"$log" 2>&1 &
  apart "$folders/1" "$pytest" --durations=10 $first
  failed=$?
  wait $! || failed=1
  cat "$log"
else
  "$pytest" --durations=10 $first $second
  failed=$?
fi
exit "$failed"
