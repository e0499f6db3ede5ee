"""Runs programs that nobody trusts in containers, by the command of docker, podman, or one like them.

    Containers(image="python:3.12-slim").sandbox(SandboxLimits())              # raises SandboxError where none starts
    Containers(image="gcc:14", client=("podman",), options=("--runtime=runsc",))

A program has a container of its own, which sees no network and nothing of the machine but the image, read-only, and a
folder in memory. Its files come by the container's standard input, so the client may be of another machine. At its
deadline, or if the caller dies, the container is removed; `outside.py` does that. An image needs a shell, `base64`,
`mkdir` and `rm`.
"""

from __future__ import annotations

import base64
import os
import posixpath
import secrets
import selectors
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ops.sandbox import CHUNK, SandboxError, SandboxLimits, SandboxRun, end_group, exit_code, read_output
from ops.sandbox.given import Wrong, call_problems, is_text, refuse, word_problems

FOLDER = "/tmp"  # where a program starts, with its files: each image has it
NOBODY = "65534:65534"
START_S = 60.0  # for a container to start
END_S = 90.0  # for it to be removed
SHOWN = 300  # characters of what a client says
SETTING_UP = 2  # processes beside the program's: the shell, and what it runs first
_OUTSIDE = Path(__file__).with_name("outside.py")


@dataclass(frozen=True, kw_only=True)
class Containers:
    """Where programs run.

    image    that the machine has; it is never fetched
    client   the command that runs containers, with options of its own
    options  more of `run`, as for another runtime

    The client works in an empty folder of its own, where podman leaves files: paths in what it is given are absolute.
    """

    image: str
    client: Sequence[str] = ("docker",)
    options: Sequence[str] = ()

    def sandbox(self, limits: SandboxLimits | None = None) -> ContainerSandbox:
        """Start a container, to try it, and return what runs others. Raises SandboxError if none starts, and ValueError
        for what could start none."""
        made = ContainerSandbox(self, limits or SandboxLimits())
        if not (ran := made.run(["true"])).ok:
            raise SandboxError(f"a container of {self.image!r} does not run true: {ran.error.strip() or ran.why}")
        return made

    def problems(self) -> Iterator[Wrong]:
        """What is wrong with them, as (what, why, fix)."""
        image = self.image
        if not is_text(image) or image.split() != [image] or image.startswith("-"):
            why = "it is the name of one image; what begins with - would be an option of the client"
            yield f"Containers has image={image!r:.60}", why, 'image="python:3.12-slim"'
        yield from word_problems("Containers", "client", self.client, fix=["docker"])
        yield from word_problems("Containers", "options", self.options, fix=["--runtime=runsc"], least=0)


class ContainerSandbox:
    """Runs programs as `ops.sandbox.Sandbox` does; threads may share it.

    `seconds` begin when the container has started. `memory_bytes` are also the most that the container has, with what
    the program writes.
    """

    def __init__(self, containers: Containers, limits: SandboxLimits) -> None:
        refuse([*containers.problems(), *limits.problems()])
        self.containers, self.limits = containers, limits

    def run(self, command: Sequence[str], *, files: Mapping[str, str] | None = None, stdin: str = "") -> SandboxRun:
        """Run a command in a folder that has these files, by their names in it. Raises SandboxError if the container
        does not start, or cannot be removed, and ValueError for a command that is none."""
        refuse(call_problems(command, files or {}, stdin))
        begun_s = time.monotonic()
        if (program := shutil.which(self.containers.client[0])) is None:
            raise SandboxError(f"this machine has no command {self.containers.client[0]!r}")
        name, mark = f"sluice-{secrets.token_hex(8)}", secrets.token_hex(16)
        reading, living = os.pipe()
        with (
            tempfile.TemporaryDirectory() as folder,
            tempfile.TemporaryFile() as script,
            os.fdopen(living, "wb") as lifeline,
            os.fdopen(reading, "rb") as ends,
        ):
            script.write(script_of(command, files or {}, stdin, mark, self.limits).encode())
            script.seek(0)
            client = os.path.abspath(program), *self.containers.client[1:]
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_OUTSIDE), str(reading), name, str(len(client)), *client,
                 *self._arguments(name)],
                pass_fds=[reading], stdin=script, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                start_new_session=True, cwd=folder,
            )  # fmt: skip
            ends.close()
            try:
                written = read_output(process, self.limits, begun_s + START_S, f"{mark}\n".encode())
            finally:
                lifeline.close()
                self._wait(process, name)
        if not written.began:
            raise SandboxError(f"a container of {self.containers.image!r} has not started: {_shown(written.error)}")
        return SandboxRun(
            code=-signal.SIGKILL if written.why else exit_code(process.returncode),
            output=written.output.decode(errors="replace"),
            error=written.error.decode(errors="replace"),
            why=written.why,
            took_s=time.monotonic() - begun_s,
        )

    def _arguments(self, name: str) -> list[str]:
        limits = self.limits
        most = limits.memory_bytes
        return [
            "run", "--rm", "--interactive", f"--name={name}", "--pull=never", "--log-driver=none",
            "--stop-timeout=0",
            "--network=none", "--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges", f"--user={NOBODY}",
            f"--memory={most}", f"--memory-swap={most}", f"--pids-limit={limits.processes + SETTING_UP}",
            f"--ulimit=cpu={limits.cpu_s}:{limits.cpu_s}",
            f"--ulimit=fsize={limits.folder_bytes}:{limits.folder_bytes}",
            "--ulimit=nofile=256:256", "--ulimit=core=0:0",
            f"--tmpfs={FOLDER}:rw,exec,nosuid,nodev,mode=1777,size={limits.folder_bytes}", f"--workdir={FOLDER}",
            f"--env=HOME={FOLDER}", f"--env=TMPDIR={FOLDER}", "--env=LANG=C.UTF-8", "--env=PYTHONDONTWRITEBYTECODE=1",
            "--entrypoint=sh", *self.containers.options, self.containers.image, "-s",
        ]  # fmt: skip

    def _wait(self, process: subprocess.Popen[bytes], name: str) -> None:
        """Wait until the container is gone. Its client ends once it has written all that it has."""
        assert process.stdout and process.stderr
        until_s = time.monotonic() + END_S
        try:
            with selectors.DefaultSelector() as selector:
                for stream in (process.stdout, process.stderr):
                    selector.register(stream, selectors.EVENT_READ)
                while selector.get_map() and (ready := selector.select(max(0.0, until_s - time.monotonic()))):
                    for key, _ in ready:
                        if not os.read(key.fd, CHUNK):
                            selector.unregister(key.fileobj)
            process.wait(max(0.0, until_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            client = shlex.join(self.containers.client)
            raise SandboxError(f"the container {name} may still run: {client} has not removed it") from None
        finally:
            end_group(process)


def script_of(command: Sequence[str], files: Mapping[str, str], stdin: str, mark: str, limits: SandboxLimits) -> str:
    """What the container's shell reads: it writes the files, says `mark`, and runs the command. Raises SandboxError for
    a file outside the folder."""
    lines = ["set -e", *_written(".stdin", stdin), "exec 3<.stdin", "rm .stdin"]
    for name, text in files.items():
        path = posixpath.normpath(name)
        if path.startswith(("/", "../")) or path in (".", ".."):
            raise SandboxError(f"the file {name!r} lies outside the program's folder")
        lines += [f"mkdir -p {shlex.quote('./' + posixpath.dirname(path))}", *_written(path, text)]
    lines += [f"ulimit -v {limits.memory_bytes >> 10}", "set +e", f"echo {mark} >&2"]
    return "\n".join([*lines, f"{shlex.join(command)} <&3 3<&-", "exit $?", ""])


def _written(path: str, text: str) -> list[str]:
    return [f"echo {base64.b64encode(text.encode()).decode()} | base64 -d >{shlex.quote('./' + path)}"]


def _shown(said: bytes) -> str:
    lines = said.decode(errors="replace").strip().splitlines()
    return " ".join(line.strip() for line in lines if line.strip())[:SHOWN] or "its client said nothing"
