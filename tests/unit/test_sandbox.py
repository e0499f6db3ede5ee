"""Programs that nobody trusts: what they see, what they may use, and that nothing of them is left."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

import ops.sandbox
from ops.sandbox import FIRST_USER, USERS, Sandbox, SandboxError, SandboxLimits, SandboxRun
from ops.sandbox.calls import CLONE3, MACHINES, OTHER_NUMBERS, refusing
from tests.doors import REPOSITORY

SMALL = SandboxLimits(
    seconds=5.0, cpu_s=2, memory_bytes=256 << 20, folder_bytes=1 << 20, processes=8, output_bytes=4096
)


MACHINE = os.uname().machine
CALLS = f"""
import ctypes, errno
call = ctypes.CDLL(None, use_errno=True).syscall
def said(number, *given):
    done = call(*(one if isinstance(one, bytes) else ctypes.c_long(one) for one in (number, *given)))
    return errno.errorcode[ctypes.get_errno()] if done < 0 else "done"
refused = {MACHINES[MACHINE][2]}
memory, memory_of_all = said(refused["memfd_create"], b"a", 0), said(refused["shmget"], 0, 4096, 0o1600)
spaces = said(refused["unshare"], 0x10020000), said({MACHINES[MACHINE][1]}, 0x10000000 | 17, *[0] * 4)
print(memory, memory_of_all, *spaces)
print(said({CLONE3}, 0, 0), said({OTHER_NUMBERS}), [one for one in refused if said(refused[one], *[-1] * 6) != "EPERM"])
"""
CALLS_SAID = "EPERM EPERM EPERM EPERM\nENOSYS EPERM []\n"


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    try:
        return Sandbox(SMALL)
    except SandboxError as error:
        pytest.skip(str(error))


def python(sandbox: Sandbox, code: str, **given: str) -> SandboxRun:
    return sandbox.run(["python3", "main.py"], files={"main.py": code}, **given)


def test_a_program_has_its_files_its_input_and_its_output(sandbox: Sandbox) -> None:
    code = "import sys, data.numbers as n\nprint(n.SEVEN * int(sys.stdin.read()))\nsys.exit(3)"
    ran = sandbox.run(["python3", "main.py"], files={"main.py": code, "data/numbers.py": "SEVEN = 7"}, stdin="6")
    assert ran == SandboxRun(code=3, output="42\n", error="") and not ran.ok
    assert sandbox.run(["true"]).ok
    assert sandbox.run(["no_such_program"]) == SandboxRun(
        code=127, output="", error="no_such_program: No such file or directory\n"
    )
    assert python(sandbox, "import os\nos.abort()").code == -signal.SIGABRT
    assert python(sandbox, "import os\nos._exit(200)").code == 200


def test_a_caller_whose_files_are_its_own_only_has_sandboxes_too(sandbox: Sandbox) -> None:
    """As a worker of a run is."""
    before = os.umask(0o077)
    try:
        ran = python(sandbox, "import sys, decimal\nprint(sys.prefix)")
    finally:
        os.umask(before)
    assert ran == SandboxRun(code=0, output=f"{sys.base_prefix}\n", error="")


@pytest.mark.parametrize(
    "code",
    [
        "open('/etc/shadow').read()",
        f"open({str(Path(__file__))!r}).read()",
        "open('/usr/bin/new', 'w')",
        "open('/new', 'w')",
        "open('/dev/new', 'w')",
        "import os; os.mkdir('/proc/new')",
        "import os; os.setuid(0)",
        "import os; os.chroot('.')",
        "import os; os.mknod('disk', 0o60666, os.makedev(8, 0))",
        "import ctypes; assert ctypes.CDLL(None).mount(b'x', b'/work', b'tmpfs', 0, None) == 0",
        "import ctypes; assert ctypes.CDLL(None).unshare(0x00020000) == 0",
        "import ctypes; assert ctypes.CDLL(None).unshare(0x10020000) == 0",  # in which a mount of memory would succeed
        "import os; os.memfd_create('memory')",
        "import ctypes; assert ctypes.CDLL(None).shmget(0, 1 << 20, 0o1600) >= 0",
        "import socket; socket.create_connection(('127.0.0.1', PORT), 2)",
        "import socket; socket.create_connection(('192.0.2.1', 80), 2)",
        "import socket; s = socket.socket(); s.bind(('0.0.0.0', 0)); s.connect(s.getsockname())",
        "import os; os.kill(OWNER, 0)",
        "import os; assert [p for p in os.listdir('/proc') if p.isdigit() and int(p) > 1 and int(p) != os.getpid()]",
        "import os; assert [n for n in os.listdir('/proc/self/fd') if int(n) > 3]",
        "import os; assert {'HOSTNAME', 'PYTHONPATH', 'SECRET'} & os.environ.keys()",
    ],
)
def test_a_program_reaches_nothing_outside(sandbox: Sandbox, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "1")
    with socket.create_server(("127.0.0.1", 0)) as server:
        code = code.replace("PORT", str(server.getsockname()[1])).replace("OWNER", str(os.getpid()))
        ran = python(sandbox, code)
    assert ran.code == 1 and not ran.why and "Error" in ran.error, ran


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("x = bytearray(1 << 30)", "MemoryError"),
        ("open('big', 'wb').write(bytes(2 << 20))", "Error"),
        ("for n in range(9): open(f'part{n}', 'wb').write(bytes(1 << 18))", "No space left"),
        ("import os\nfor n in range(99): os.fork() or __import__('time').sleep(9)", "BlockingIOError"),
        (
            "import threading as t, time\nfor n in range(99): t.Thread(target=time.sleep, args=(9,), daemon=1).start()",
            "can't start",
        ),
    ],
)
def test_what_a_program_uses_is_limited(sandbox: Sandbox, code: str, says: str) -> None:
    ran = python(sandbox, code)
    assert (not ran.ok and says in ran.error) or ran.code == -signal.SIGXFSZ, ran


def test_calls_that_get_round_limits_are_refused(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """By their numbers too, under each name of one; where a filter is not to be had, there is no sandbox."""
    assert python(sandbox, CALLS) == SandboxRun(code=0, output=CALLS_SAID, error="")
    if MACHINE == "x86_64":
        own_number = "b'\\xb8\\x14\\0\\0\\0\\xcd\\x80\\xc3'"  # getpid of a 32-bit program
        code = (
            f"import ctypes, mmap\npage = mmap.mmap(-1, 4096, prot=7)\npage.write({own_number})\n"
            "print(ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))())"
        )
        ran = python(sandbox, code)
        assert ran.output == "-1\n" or ran.code == -signal.SIGSEGV, "of a kernel that has no such programs"
    monkeypatch.setattr(ops.sandbox, "refusing", lambda _: bytes(8))
    with pytest.raises(SandboxError, match=r"seccomp: Invalid argument$"):
        Sandbox(SMALL)
    monkeypatch.setattr(ops.sandbox, "refusing", lambda _: refusing("riscv64"))
    with pytest.raises(SandboxError, match=rf"^a sandbox does not start: .* system calls of {MACHINE},"):
        Sandbox(SMALL)


def test_threads_and_processes_and_compilers_work(sandbox: Sandbox) -> None:
    code = (
        "import subprocess as s, threading as t\none = t.Thread(target=print, args=('thread',))\none.start()\n"
        "one.join()\nprint(s.run(['echo', 'spawned'], capture_output=True, text=True).stdout, end='')\n"
        "print(s.run(['echo', 'forked'], preexec_fn=lambda: 0, capture_output=True, text=True).stdout, end='')"
    )
    assert python(sandbox, code) == SandboxRun(code=0, output="thread\nspawned\nforked\n", error="")
    if shutil.which("gcc", path="/usr/bin"):
        source = '#include <stdio.h>\nint main(void) { return puts("compiled") < 0; }'
        ran = sandbox.run(["sh", "-c", "gcc main.c && ./a.out"], files={"main.c": source})
        assert ran == SandboxRun(code=0, output="compiled\n", error="")


def test_a_program_that_never_ends_is_killed_with_all_that_it_started(sandbox: Sandbox) -> None:
    code = (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    os.fork()\nprint('on', flush=True)\ntime.sleep(99)"
    )
    ran = Sandbox(SandboxLimits(seconds=1.5)).run(["python3", "-c", code])
    assert (ran.why, ran.output) == ("deadline", "on\n" * 3) and 1.0 < ran.took_s < 4.0
    assert gone()
    spin = Sandbox(SandboxLimits(cpu_s=1)).run(["python3", "-c", "while True: pass"])
    assert not spin.why and spin.code in (-signal.SIGKILL, -signal.SIGXCPU)


def test_what_a_program_leaves_behind_ends_with_it(sandbox: Sandbox) -> None:
    code = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    os.close(1), os.close(2)\n    time.sleep(99)"
    begun_s = time.monotonic()
    assert python(sandbox, code).ok and time.monotonic() - begun_s < 4.0
    assert gone()


def test_a_program_that_writes_too_much_is_killed(sandbox: Sandbox) -> None:
    ran = python(sandbox, "while True: print('x' * 999)")
    assert ran.why == "output" and len(ran.output) == SMALL.output_bytes


WRONG: dict[str, list[object]] = {
    "command": ["python3 main.py", "", [], (), None, 3, ["true", 1], [b"true"], ["a\0b"], {"true"}],
    "files": [{"main.py": b""}, {1: ""}, ["main.py"], "main.py"],
    "stdin": [b"1", None],
    "readable": ["/usr", ["usr"], [""], [Path("/usr")], None],
    "seconds": [0, -1.0, float("nan"), float("inf"), 1e9, "2", True, None],
    **{
        name: [0, -1, 1.5, True, "1", None, 1 << 63]
        for name in ("cpu_s", "memory_bytes", "folder_bytes", "processes", "output_bytes")
    },
}


@pytest.mark.parametrize("name", WRONG)
def test_what_no_program_can_have_is_refused_before_anything_starts(
    sandbox: Sandbox, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)
    for value in WRONG[name]:
        given = {name: value}
        told = rf"^(a sandbox|SandboxLimits) has {re.escape(name)}=.*; .*\. Fix: {name}="
        with pytest.raises(ValueError, match=told) as raised:
            if name in ("command", "files", "stdin"):
                sandbox.run(**{"command": ["true"]} | given)  # type: ignore[arg-type]
            else:
                Sandbox(**given if name == "readable" else {"limits": SandboxLimits(**given)})  # type: ignore[arg-type]
        assert len(str(raised.value).splitlines()) == 1, value
    with pytest.raises(ValueError, match=r"Fix: command=\['python3', 'my main.py'\]$"):
        sandbox.run("python3 'my main.py'")


def test_files_lie_in_the_programs_folder(sandbox: Sandbox) -> None:
    for name in ("../out", "/etc/out", "."):
        with pytest.raises(SandboxError, match="outside the program's folder"):
            sandbox.run(["true"], files={name: ""})


def test_a_program_ends_with_its_caller(sandbox: Sandbox) -> None:
    """Also if that was killed."""
    code = "from ops.sandbox import *\nSandbox(SandboxLimits(seconds=99)).run(['sleep', '98.7'])"
    with subprocess.Popen([sys.executable, "-c", code], cwd=REPOSITORY) as caller:
        deadline_s = time.monotonic() + 20.0
        while not sleeping() and time.monotonic() < deadline_s:
            time.sleep(0.05)
        assert sleeping()
        caller.kill()
    deadline_s = time.monotonic() + 10.0
    while sleeping() and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert not sleeping()


def test_who_is_not_root_has_sandboxes_too() -> None:
    """In a namespace of users. The repository and Python have to be readable for others, which they need not be."""
    if os.getuid():
        pytest.skip("this user is not root")
    code = (
        "import sys; sys.path.insert(0, 'code')\nfrom ops.sandbox import *\n"
        "script = 'id -u; cat /etc/shadow; touch /usr/new; echo done > made; cat made'\n"
        "ran = Sandbox().run(['sh', '-c', script])\nprint(ran.output.split(), ran.code)\n"
        f"print(Sandbox().run(['python3', '-c', {CALLS!r}]).output, end='')"
    )
    folder = tempfile.mkdtemp()  # pytest's are its user's only
    tmp_path = Path(folder)
    (tmp_path / "code/ops/sandbox").mkdir(parents=True)
    for path in (REPOSITORY / "ops/sandbox").glob("*.py"):
        (tmp_path / "code/ops/sandbox" / path.name).write_text(path.read_text())
    (tmp_path / "main.py").write_text(code)
    for path in (tmp_path, *tmp_path.rglob("*")):
        path.chmod(0o755)
    inside = "import os; os.setgid(65534); os.setuid(65534); exec(open('main.py').read())"
    command = [
        "/usr/bin/python3" if Path("/usr/bin/python3").exists() else sys.executable,
        "-I",
        "-c",
        f"import os; os.chdir({str(tmp_path)!r}); {inside}",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    shutil.rmtree(folder)
    if "PermissionError" in done.stderr or "SandboxError" in done.stderr:
        pytest.skip(f"not here: {done.stderr.splitlines()[-1]}")
    assert done.stdout == f"['0', 'done'] 0\n{CALLS_SAID}", done.stderr


def gone() -> bool:
    """Whether no program of a sandbox runs, within some seconds."""
    deadline_s = time.monotonic() + 10.0
    while programs() and time.monotonic() < deadline_s:
        time.sleep(0.02)
    return not programs()


def programs() -> list[psutil.Process]:
    users = range(FIRST_USER, FIRST_USER + USERS)
    return [one for one in psutil.process_iter(["uids"]) if one.info["uids"] and one.info["uids"].real in users]


def sleeping() -> list[int]:
    return [one.pid for one in psutil.process_iter(["cmdline"]) if one.info["cmdline"] == ["sleep", "98.7"]]
