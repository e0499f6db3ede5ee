"""Makes the inside of a sandbox and runs a program in it: python -I -S inside.py ORDERS FAILURE, two descriptors.

Reads what to run from ORDERS, marshalled. Writes to FAILURE why the sandbox could not be made; nothing if it was. Runs
alone: it is a process of its own, and its memory is replaced by the program's. It imports little, for each program
waits for it: `json` and `typing` would take as long as the rest.
"""

from __future__ import annotations

import ctypes
import marshal
import os
import resource
import select
import signal
import sys

TYPE_CHECKING = False  # for readers of types, who take it for true
if TYPE_CHECKING:
    from typing import Any

NEWNS, NEWCGROUP, NEWUTS, NEWIPC = 0x00020000, 0x02000000, 0x04000000, 0x08000000
NEWUSER, NEWPID, NEWNET = 0x10000000, 0x20000000, 0x40000000
RDONLY, NOSUID, NODEV, NOEXEC, REMOUNT, BIND, REC, PRIVATE = 1, 2, 4, 8, 32, 4096, 16384, 1 << 18
DETACH = 2  # of umount2
PDEATHSIG, SECCOMP, CAPBSET_DROP, NO_NEW_PRIVS = 1, 22, 24, 38  # of prctl
FILTER = 2  # of SECCOMP
STEP_BYTES = 8  # of an instruction in a filter
LAST_CAPABILITY = 63
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
DEVICES = ("null", "zero", "full", "random", "urandom")
FAILED = 125
_libc = ctypes.CDLL(None, use_errno=True)


def check(result: int, what: str) -> None:
    """Raise OSError if a call of libc has failed."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    """Mount, as in mount(2)."""
    done = _libc.mount(source.encode(), target.encode(), kind.encode() or None, flags, options.encode() or None)
    check(done, f"mount {target}")


def separate(as_root: bool) -> None:
    """Leave the namespaces of the machine; who is not root gets a namespace of users, to be root in."""
    user, group = os.getuid(), os.getgid()
    kinds = NEWNS | NEWPID | NEWNET | NEWIPC | NEWUTS | NEWCGROUP
    check(_libc.unshare(kinds | (0 if as_root else NEWUSER)), "unshare")
    if not as_root:
        for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)


def build(orders: dict[str, Any]) -> None:
    """Make the file system that the program sees, and its folder."""
    folder, size = orders["folder"], orders["limits"]["folder_bytes"]
    mount("none", "/", flags=REC | PRIVATE)
    root = "/tmp"  # hidden below: it is only a place to mount on
    mount("tmpfs", root, "tmpfs", NOSUID | NODEV, f"size={size},mode=755")
    for path in orders["readable"]:
        inside = root + path
        if os.path.islink(path):
            os.makedirs(os.path.dirname(inside), exist_ok=True)
            os.symlink(os.readlink(path), inside)
            continue
        if os.path.isdir(path):
            os.makedirs(inside, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(inside), exist_ok=True)
            open(inside, "w").close()
        mount(path, inside, flags=BIND | REC)
        mount("none", inside, flags=BIND | REMOUNT | RDONLY | NOSUID | NODEV)
    os.mkdir(f"{root}/dev", 0o755)
    for name in DEVICES:
        open(f"{root}/dev/{name}", "w").close()
        mount(f"/dev/{name}", f"{root}/dev/{name}", flags=BIND)
    for name in ("proc", "tmp"):
        os.mkdir(f"{root}/{name}", 0o755)
    mount("proc", f"{root}/proc", "proc", NOSUID | NODEV | NOEXEC)
    write(root + folder, orders)
    os.symlink(folder, f"{root}/home")
    os.chdir(root)
    number = PIVOT_ROOT[os.uname().machine]
    check(_libc.syscall(number, b".", b"."), "pivot_root")
    check(_libc.umount2(b".", DETACH), "umount")
    os.chdir("/")
    os.rmdir("/tmp")
    os.symlink(folder, "/tmp")
    mount("none", "/", flags=REMOUNT | RDONLY | NOSUID | NODEV | BIND)
    os.chdir(folder)


def write(folder: str, orders: dict[str, Any]) -> None:
    """Write the program's files into its folder, a file system of its own."""
    os.makedirs(folder)
    owner = orders["user"] if orders["user"] is not None else 0
    mount("tmpfs", folder, "tmpfs", NOSUID | NODEV, f"size={orders['limits']['folder_bytes']},mode=700,uid={owner}")
    for name, text in (orders["files"] | {".stdin": orders["stdin"]}).items():
        path = os.path.normpath(os.path.join(folder, name))
        if not path.startswith(f"{folder}/"):
            raise ValueError(f"the file {name!r} lies outside the program's folder")
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w") as file:
            file.write(text)
    for above, folders, files in os.walk(folder):
        for name in (*folders, *files):
            os.chown(os.path.join(above, name), owner, owner if orders["user"] is not None else 0)


def limit(limits: dict[str, Any]) -> None:
    """Set the limits of the program's processes."""
    for kind, value in (
        (resource.RLIMIT_CPU, limits["cpu_s"]),
        (resource.RLIMIT_AS, limits["memory_bytes"]),
        (resource.RLIMIT_FSIZE, limits["folder_bytes"]),
        (resource.RLIMIT_NPROC, limits["processes"]),
        (resource.RLIMIT_NOFILE, 256),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (value, value))


def give_up_rights(user: int | None) -> None:
    """Become nobody, for good."""
    for capability in range(LAST_CAPABILITY + 1):
        _libc.prctl(CAPBSET_DROP, capability, 0, 0, 0)  # fails for those that the kernel has not
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    check(_libc.prctl(NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    if user is None:  # root of its own namespace: without capabilities it can do nothing as such
        header, data = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
        check(_libc.capset(ctypes.byref(header), ctypes.byref(data)), "capset")


def refuse_calls(steps: bytes) -> None:
    """Have the kernel refuse system calls from now on, to all processes that this one starts."""
    held = ctypes.create_string_buffer(steps, len(steps))
    given = (ctypes.c_uint64 * 2)(len(steps) // STEP_BYTES, ctypes.addressof(held))  # as in sock_fprog
    check(_libc.prctl(SECCOMP, FILTER, ctypes.byref(given), 0, 0), "seccomp")


def run(orders: dict[str, Any], failure: int, ended: int) -> None:
    """Become the program. Only returns by an exception. `ended` has an end once the process above has ended."""
    build(orders)
    stdin = os.open(".stdin", os.O_RDONLY)
    os.unlink(".stdin")
    os.dup2(stdin, 0)
    give_up_rights(orders["user"])
    _libc.prctl(PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # which another user has lost
    if select.select([ended], [], [], 0)[0]:
        os._exit(FAILED)
    refuse_calls(orders["filter"])
    limit(orders["limits"])
    os.set_inheritable(failure, False)
    environment = {"PATH": orders["path"], "HOME": orders["folder"], "LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1"}
    os.environ.clear()
    os.environ.update(environment)
    command = orders["command"]
    if program := os.fork():
        os.close(failure)
        end_with(program)
    try:
        os.execvpe(command[0], command, environment)
    except OSError as error:
        os.write(2, f"{command[0]}: {error.strerror}\n".encode())
        os._exit(127)


def end_with(program: int) -> None:
    """Be the first process of the program's, which all others end with: wait for those that have ended, and end with
    the program as it did."""
    while True:
        child, status = os.wait()
        if child == program:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)


def main() -> None:
    """Make the namespaces, and run the program as the first process in them."""
    orders_fd, failure = int(sys.argv[1]), int(sys.argv[2])
    with os.fdopen(orders_fd, "rb") as file:
        orders = marshal.loads(file.read())
    try:
        _libc.prctl(PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        os.umask(0o022)  # the program is somebody else, and has to pass the folders that are made for it
        separate(orders["user"] is not None)
        ended, lives = os.pipe()  # this process has `lives` until its end
        child = os.fork()
        if not child:
            os.close(lives)
            run(orders, failure, ended)
    except (OSError, ValueError, KeyError) as error:
        os.write(failure, str(error).encode())
        os._exit(FAILED)
    os.close(failure)
    end_with(child)


main()
