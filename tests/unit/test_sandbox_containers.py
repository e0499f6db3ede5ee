"""Programs that nobody trusts in containers of podman, whose image has nothing: Python is the machine's."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from ops.rewards import PassesTests
from ops.sandbox import SandboxError, SandboxLimits, SandboxRun, containers
from ops.sandbox.containers import Containers, ContainerSandbox
from tests.doors import REPOSITORY
from tests.optional import lacking
from tests.waiting import until

SMALL = SandboxLimits(
    seconds=10.0, cpu_s=5, memory_bytes=256 << 20, folder_bytes=1 << 20, processes=12, output_bytes=4096
)
IMAGE = "sluice-nothing"
OUTSIDE = """
import ctypes, os, socket
print(os.getuid(), os.getcwd(), os.listdir(), socket.if_nameindex())
print("read-only" if os.statvfs("/").f_flag & os.ST_RDONLY else "written")
print(*[line.split()[1] for line in open("/proc/self/status") if line.startswith(("CapBnd", "NoNewPrivs"))])
ATTEMPTS = {
    "host file": lambda: open(REPOSITORY).read(),
    "secret": lambda: open("/etc/shadow").read(),
    "system": lambda: open("/usr/bin/new", "w"),
    "root": lambda: open("/new", "w"),
    "user": lambda: os.setuid(0),
    "chroot": lambda: os.chroot("."),
    "namespace": lambda: ctypes.CDLL(None).unshare(0x00020000) == 0 or 1 / 0,
    "mount": lambda: ctypes.CDLL(None).mount(b"x", b"/tmp", b"tmpfs", 0, None) == 0 or 1 / 0,
    "loopback": lambda: socket.create_connection(("127.0.0.1", PORT), 2),
    "network": lambda: socket.create_connection(("192.0.2.1", 80), 2),
    "processes": lambda: [p for p in os.listdir("/proc") if p.isdigit() and int(p) not in (1, os.getpid())][0],
    "descriptors": lambda: [n for n in os.listdir("/proc/self/fd") if int(n) > 3][0],
    "environment": lambda: os.environ["SECRET"],
    "too much": lambda: open("big", "wb").write(bytes(2 << 20)),
    "memory": lambda: bytearray(1 << 30),
}
for name, attempt in ATTEMPTS.items():
    try:
        attempt()
        print(name)
    except Exception:
        pass
"""


@pytest.fixture(scope="module")
def podman() -> Iterator[Containers]:
    if shutil.which("podman") is None:
        lacking("podman", "containers need the command podman")
    store = tempfile.mkdtemp(prefix="podman-")  # podman refuses the longer paths of pytest
    runtime = ["--runtime=runc"] if shutil.which("runc") else []
    client = ["podman", f"--root={store}/root", f"--runroot={store}/run", "--storage-driver=vfs", *runtime]
    subprocess.run([*client, "import", "-", IMAGE], input=nothing(), check=True, capture_output=True, timeout=60)
    prefix = sys.base_prefix
    options = (
        "--volume=/usr:/usr:ro",
        f"--volume={prefix}:{prefix}:ro",
        f"--env=PATH={prefix}/bin:/usr/bin",
        "--ulimit=nproc=2000:2000",
    )
    made = Containers(image=IMAGE, client=client, options=options)
    try:
        made.sandbox(SMALL)
    except SandboxError as error:
        lacking("podman", str(error))
    yield made
    assert names(made) == []
    shutil.rmtree(store)


@pytest.fixture(scope="module")
def sandbox(podman: Containers) -> ContainerSandbox:
    return podman.sandbox(SMALL)


def nothing() -> bytes:
    """An image of empty folders, and of links to those of the machine."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        for name in ("usr", "etc", "proc", "sys", "dev", "tmp", "bin", "lib", "lib64"):
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o1777 if name == "tmp" else 0o755
            if Path(f"/{name}").is_symlink():
                entry.type, entry.linkname = tarfile.SYMTYPE, os.readlink(f"/{name}")
            archive.addfile(entry)
    return made.getvalue()


def names(of: Containers) -> list[str]:
    """The containers that there are, also those that do not run."""
    command = [*of.client, "ps", "--all", "--format={{.Names}}"]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout.split()


def python(sandbox: ContainerSandbox, code: str) -> SandboxRun:
    return sandbox.run(["python3", "main.py"], files={"main.py": code})


def test_a_program_has_its_files_its_input_and_its_output(sandbox: ContainerSandbox) -> None:
    code = "import sys, data.it_s as n\nprint(n.SEVEN * int(sys.stdin.read()), n.TEXT)\nsys.exit(3)"
    text = "SEVEN = 7\nTEXT = 'é\\'$(id)`'"
    ran = sandbox.run(["python3", "main.py"], files={"main.py": code, "data/it_s.py": text, "it's": ""}, stdin="6")
    assert ran == SandboxRun(code=3, output="42 é'$(id)`\n", error="") and not ran.ok
    ended = sandbox.run(["sh", "-c", 'echo "$1"; kill -ABRT $$', "sh", "it's"])
    assert (ended.code, ended.output, ended.why) == (-signal.SIGABRT, "it's\n", "")
    missing = sandbox.run(["no_such_program"])
    assert missing.code == 127 and "no_such_program: not found" in missing.error
    with pytest.raises(SandboxError, match="outside the program's folder"):
        sandbox.run(["true"], files={"../out": ""})


def test_a_program_reaches_nothing_outside(sandbox: ContainerSandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "1")
    with socket.create_server(("127.0.0.1", 0)) as server:
        code = OUTSIDE.replace("PORT", str(server.getsockname()[1])).replace("REPOSITORY", repr(__file__))
        ran = python(sandbox, code)
    said = "65534 /tmp ['main.py'] [(1, 'lo')]\nread-only\n0000000000000000 1\n"
    assert ran == SandboxRun(code=0, output=said, error="")


def test_what_a_program_uses_is_limited(
    sandbox: ContainerSandbox, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    forks = python(sandbox, "import os, time\nfor n in range(99): os.fork() or time.sleep(9)")
    assert "BlockingIOError" in forks.error and not forks.why
    together = (
        "import os, time\nfor n in range(3):\n    os.fork()\nx = bytearray(b'x') * (100 << 20)\n"
        "os.write(1, b'held ')\ntime.sleep(5)\n"
    )
    assert python(sandbox, together).output.count("held") < 8, "eight times 100 MiB"
    assert list(tmp_path.iterdir()) == [], "podman writes a file where its client works"
    wrote = python(sandbox, "while True: print('x' * 999)")
    assert wrote.why == "output" and len(wrote.output) == SMALL.output_bytes


def test_a_program_that_never_ends_is_gone_with_its_container(podman: Containers) -> None:
    code = (
        "import os, signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nos.fork() or os.setsid()\n"
        "print('on', flush=True)\ntime.sleep(98)"
    )
    ran = python(podman.sandbox(replace(SMALL, seconds=1.5)), code)
    assert ran == SandboxRun(code=-signal.SIGKILL, output="on\n" * 2, error="", why="deadline") and not names(podman)


@pytest.mark.parametrize("killed", ["caller", "caller at once", "client"])
def test_a_container_ends_with_those_who_want_it(podman: Containers, killed: str) -> None:
    """Also if they are killed, and before the container is there."""
    code = (
        f"from ops.sandbox.containers import *\nmade = {podman!r}\n"
        "ContainerSandbox(made, SandboxLimits(seconds=99)).run(['sleep', '98.6'])"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=REPOSITORY) as caller:
        (keeper,) = until(lambda: clients(caller.pid))
        if killed != "caller at once":
            until(sleeping)
        (psutil.Process(keeper).children()[0] if killed == "client" else caller).kill()
    until(lambda: not clients() and not sleeping() and not names(podman))


def clients(caller: int | None = None) -> list[int]:
    """What keeps containers, here or of a caller."""
    return [
        one.pid
        for one in psutil.process_iter(["cmdline", "ppid"])
        if str(containers._OUTSIDE) in (one.info["cmdline"] or ()) and caller in (None, one.info["ppid"])
    ]


def sleeping() -> list[int]:
    return [one.pid for one in psutil.process_iter(["cmdline"]) if one.info["cmdline"] == ["sleep", "98.6"]]


def test_why_no_container_starts_is_said(podman: Containers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(SandboxError, match="this machine has no command 'no-such-docker'"):
        Containers(image=IMAGE, client=("no-such-docker",)).sandbox()
    with pytest.raises(SandboxError, match=r"a container of 'no-such-image' has not started: Error: .*not known"):
        replace(podman, image="no-such-image").sandbox()
    unreachable = Containers(image=IMAGE, client=("podman", "--remote", f"--url=unix://{tmp_path}/none.sock"))
    with pytest.raises(SandboxError, match=r"has not started: (?i:.*connect)"):
        unreachable.sandbox()
    (hangs := tmp_path / "docker").write_text("#!/bin/sh\nexec sleep 98.6\n")
    hangs.chmod(0o755)
    monkeypatch.setattr(containers, "START_S", 0.2)
    monkeypatch.setattr(containers, "END_S", 0.5)
    with pytest.raises(SandboxError, match=r"the container sluice-\w+ may still run"):
        Containers(image=IMAGE, client=(str(hangs),)).sandbox()
    until(lambda: not sleeping())


def test_what_starts_no_container_is_refused_before_a_client_is_asked(tmp_path: Path) -> None:
    (client := tmp_path / "docker").write_text(f"#!/bin/sh\necho asked >>{tmp_path}/asked\n")
    client.chmod(0o755)
    right = Containers(image=IMAGE, client=(str(client),))
    wrong: dict[str, list[Any]] = {
        "image": ["", " ", "--privileged", "-v=/:/host", "two words", "a\nb", None, 3],
        "client": ["docker", "", (), [], None, (1,), (b"docker",), {"docker": 1}],
        "options": ["--runtime=runsc", (1,), None],
    }
    for name, values in wrong.items():
        for value in values:
            for starts in (Containers.sandbox, lambda made: ContainerSandbox(made, SMALL)):
                with pytest.raises(ValueError, match=rf"^Containers has {name}=.*; .*\. Fix: {name}=.*$"):
                    starts(replace(right, **{name: value}))
    with pytest.raises(ValueError, match=r"^SandboxLimits has memory_bytes=-1; "):
        right.sandbox(SandboxLimits(memory_bytes=-1))
    made = ContainerSandbox(right, SMALL)
    for command in ("python3 main.py", [], ["true", 1], None):
        with pytest.raises(ValueError, match=r"^a sandbox has command=.*; .*\. Fix: command=\['"):
            made.run(command)
    with pytest.raises(ValueError, match=r"^a sandbox has files=.*; .*\. Fix: files="):
        made.run(["true"], files={"main.py": b""})  # type: ignore[dict-item]
    assert not (tmp_path / "asked").exists()
    with pytest.raises(SandboxError, match="has not started"):
        made.run(["true"])
    assert "asked" in (tmp_path / "asked").read_text(), "by what may be run"


@pytest.mark.parametrize("forks", [False, True])
def test_rewards_run_programs_in_containers(podman: Containers, forks: bool) -> None:
    tests = json.dumps([{"stdin": f"{a} {b}", "stdout": str(a + b)} for a, b in ((1, 2), (3, 4))])
    reward = PassesTests(containers=podman, limits=SMALL, forks=forks)
    assert [*reward.problems()] == []
    right, half = "a, b = map(int, input().split())\nprint(a + b)", "print(7)"
    assert reward([right, half], [tests] * 2) == [1.0, 0.5]
    ((what, why, fix),) = replace(reward, containers=replace(podman, image="no-such-image")).problems()
    assert "has not started" in what and "sandbox" in why and "this image" in fix
