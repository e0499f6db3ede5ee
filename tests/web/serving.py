"""The web view in its own process, started as by a user, and raw HTTP requests to it."""

from __future__ import annotations

import http.client
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

START_S = 30.0


class Served:
    """A running view. `address` is what it printed."""

    def __init__(self, process: subprocess.Popen[str], address: str, folder: Path) -> None:
        self.process, self.address = process, address
        self.folder = folder
        self.port = urlsplit(address).port or 0
        self.token = urlsplit(address).query.removeprefix("token=")
        self.cookie = f"sluice_{self.port}={self.token}"

    def ask(self, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
        """Return status, headers and body. `Host` and `Cookie` are correct unless given."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        given = {"Host": f"127.0.0.1:{self.port}", "Cookie": self.cookie} | headers
        connection.putrequest(method, path, skip_host=True)
        for name, value in given.items():
            if value:
                connection.putheader(name.replace("_", "-"), value)
        connection.endheaders()
        answer = connection.getresponse()
        found = answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
        connection.close()
        return found


@contextmanager
def serving(folder: Path, before: Sequence[str] = ()) -> Iterator[Served]:
    """Run `python -m pipeline.view FOLDER` until the block ends; the words `before` precede the command."""
    command = [*before, sys.executable, "-m", "pipeline.view", str(folder), "--port", "0", "--no-open"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield Served(process, process.stdout.readline().strip(), folder)
    finally:
        process.terminate()
        assert process.wait(10) == 0
