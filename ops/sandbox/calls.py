"""The system calls that no program of a sandbox may make, as a filter of seccomp. Pure.

refusing("x86_64")  # instructions for the kernel, as bytes; nothing for a machine whose calls are not known

Each would get round a limit, or reach a part of the kernel that programs need least: memory that belongs to no process,
namespaces and mounts in which a program has rights again, other processes' memory. All fail with EPERM, but `clone3`,
whose flags a filter cannot see, with ENOSYS: libraries then use `clone`, which may make everything but namespaces.
"""

from __future__ import annotations

import errno
import struct

LOAD, EQUAL, SET, RETURN = 0x20, 0x15, 0x45, 0x06  # instructions: a word of the call, two jumps, the end
NUMBER, MACHINE, FLAGS = 0, 4, 16  # where a call has its number, its kind of machine, and half its first argument
ALLOW, FAIL = 0x7FFF0000, 0x00050000  # ends; FAIL is with an error
NAMESPACES = 0x7E020000  # flags of clone
OTHER_NUMBERS = 0x40000000  # of x32, which would be a second name for each call
CLONE3 = 435
EVERYWHERE = {
    "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427,
    "open_tree": 428, "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433,
    "pidfd_getfd": 438, "process_madvise": 440, "mount_setattr": 442, "memfd_secret": 447, "open_tree_attr": 467,
}  # fmt: skip
X86_64 = {
    "shmget": 29, "semget": 64, "msgget": 68, "mq_open": 240, "memfd_create": 319,
    "pivot_root": 155, "mount": 165, "umount2": 166, "unshare": 272, "setns": 308,
    "add_key": 248, "request_key": 249, "keyctl": 250,
    "perf_event_open": 298, "bpf": 321, "userfaultfd": 323,
    "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312,
}  # fmt: skip
AARCH64 = {
    "shmget": 194, "semget": 190, "msgget": 186, "mq_open": 180, "memfd_create": 279,
    "pivot_root": 41, "mount": 40, "umount2": 39, "unshare": 97, "setns": 268,
    "add_key": 217, "request_key": 218, "keyctl": 219,
    "perf_event_open": 241, "bpf": 280, "userfaultfd": 282,
    "ptrace": 117, "process_vm_readv": 270, "process_vm_writev": 271, "kcmp": 272,
}  # fmt: skip
MACHINES = {  # by their names: the kernel's number of each, its `clone`, and what is refused
    "x86_64": (0xC000003E, 56, X86_64 | EVERYWHERE),
    "aarch64": (0xC00000B7, 220, AARCH64 | EVERYWHERE),
}


def refusing(machine: str) -> bytes:
    """Return the filter of a machine. A call for another kind of machine, such as its 32-bit one, fails too."""
    if machine not in MACHINES:
        return b""
    kind, clone, refused = MACHINES[machine]
    fails = _step(RETURN, FAIL | errno.EPERM)
    made = _step(LOAD, MACHINE) + _step(EQUAL, kind, no=0, yes=1) + fails
    made += _step(LOAD, NUMBER) + _step(SET, OTHER_NUMBERS) + fails
    for number in sorted(refused.values()):
        made += _step(EQUAL, number) + fails
    made += _step(EQUAL, CLONE3) + _step(RETURN, FAIL | errno.ENOSYS)
    made += _step(EQUAL, clone, no=3) + _step(LOAD, FLAGS) + _step(SET, NAMESPACES) + fails
    return made + _step(RETURN, ALLOW)


def _step(what: int, value: int, *, yes: int = 0, no: int | None = None) -> bytes:
    """An instruction. A jump passes over `yes` or `no` of the next; by default the next is what holds for yes."""
    jumps = what in (EQUAL, SET)
    return struct.pack("=HBBI", what, yes, (1 if no is None else no) if jumps else 0, value)
