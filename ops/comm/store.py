"""Lets several threads of a process wait on a key-value store through one connection.

    group = StatelessGroup.over(Asking(client, deadline_s=60), rank=0, ranks=2, device=device, name="...")

torch's client is blocked while a thread waits in it, and new connections are expensive: the server looks up the host
name of each one and serves no requests meanwhile, for seconds if name servers are slow.
"""

from __future__ import annotations

import time
from datetime import timedelta

import torch.distributed as dist

SHORTEST_S, LONGEST_S = 5e-4, 2e-2  # between two polls


class Asking(dist.Store):
    """Waits by polling. A key that does not arrive within `deadline_s` raises DistStoreError. So does a missing key as
    soon as the key `over` is set: the server stores there why waiting is pointless.

    C++ can call these methods only while Python holds a reference to this object.
    """

    def __init__(self, client: dist.Store, deadline_s: float, over: str = "") -> None:
        super().__init__()
        self._client, self._deadline, self._over = client, timedelta(seconds=deadline_s), over

    def set(self, key: str, value: str) -> None:
        """Set a key."""
        self._client.set(key, value)

    def get(self, key: str) -> bytes:
        """Return the value of a key; waits until it is set."""
        self.wait([key])
        return bytes(self._client.get(key))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait for all keys."""
        ends_s = time.monotonic() + (timeout or self._deadline).total_seconds()
        pause_s = SHORTEST_S
        while not self._client.check(keys):
            if reason := self.reason():
                raise dist.DistStoreError(reason)
            if time.monotonic() > ends_s:
                raise dist.DistStoreError(f"{' and '.join(keys)} did not arrive in time")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_S)

    def reason(self) -> str:
        """Return why waiting is pointless, or "" if it is not."""
        is_over = bool(self._over) and self._client.check([self._over])
        return bytes(self._client.get(self._over)).decode() if is_over else ""
