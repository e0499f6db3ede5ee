"""Keeps a container no longer than its caller: python -I -S outside.py LIFELINE NAME COUNT CLIENT... ARGUMENTS...

Runs the client, the next COUNT words, with the arguments, and ends as it does. A container outlives its client: once
the descriptor LIFELINE has an end, because the caller closes it or has died, the container NAME is removed. The client
is not killed before: it could have asked for a container that is not there yet. One that somebody else kills leaves
its container behind, which is removed too.
"""

from __future__ import annotations

import os
import select
import signal
import sys

AGAIN_S = 0.2  # between two times that it is removed, until its client has ended
REMOVE_S = 30.0  # for a client to remove it
TIMES = 100


def start(command: list[str], *, silent: bool = False) -> tuple[int, int]:
    """Start a command. Returns its process, and a descriptor that is ready once it has ended."""
    null = [(os.POSIX_SPAWN_OPEN, stream, os.devnull, os.O_RDWR, 0) for stream in range(3)]
    process = os.posix_spawnp(command[0], command, os.environ, file_actions=null if silent else [])
    return process, os.pidfd_open(process)


def ready(descriptors: list[int], within_s: float | None = None) -> list[int]:
    """Those that are ready."""
    return select.select(descriptors, [], [], within_s)[0]


def remove(client: list[str], name: str) -> None:
    """Remove a container, if it is there."""
    process, ended = start([*client, "rm", "--force", name], silent=True)
    if not ready([ended], REMOVE_S):
        os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    os.close(ended)


def main() -> int:
    """Returns the exit code of the client, or 128 and the signal that has ended it."""
    lifeline, name, count = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    client, arguments = sys.argv[4 : 4 + count], sys.argv[4 + count :]
    process, ended = start([*client, *arguments])
    over = ended not in ready([lifeline, ended])
    for _ in range(TIMES if over else 0):
        remove(client, name)
        if ready([ended], AGAIN_S):
            break
    if not ready([ended], 0.0):
        os.kill(process, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    if over or code < 0:
        remove(client, name)
    return code if code >= 0 else 128 - code


sys.exit(main())
