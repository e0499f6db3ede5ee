"""A key-value store that several threads of a process wait at through one connection.

    group = StatelessGroup.over(Asking(client, deadline_s=60), rank=0, ranks=2, device=device, name="...")

torch's client is taken as long as somebody waits in it, and another connection is dear: whoever serves the store looks
the name of every new one's address up, and answers nobody meanwhile, for seconds where name servers are slow.
"""

from __future__ import annotations

import time
from datetime import timedelta

import torch.distributed as dist

SHORTEST_S, LONGEST_S = 5e-4, 2e-2  # between two questions


class Asking(dist.Store):
    """Waits by asking again. A key that does not come in `deadline_s` is a DistStoreError; so is, at once, one that has
    not come when `over` has: whoever serves the store says there why nobody needs to wait any more.

    C++ reaches these methods only as long as Python holds this object too.
    """

    def __init__(self, client: dist.Store, deadline_s: float, over: str = "") -> None:
        super().__init__()
        self._client, self._deadline, self._over = client, timedelta(seconds=deadline_s), over

    def set(self, key: str, value: str) -> None:
        """Set a key."""
        self._client.set(key, value)

    def get(self, key: str) -> bytes:
        """What a key has, once it is there."""
        self.wait([key])
        return bytes(self._client.get(key))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Until all keys are there."""
        ends_s = time.monotonic() + (timeout or self._deadline).total_seconds()
        pause_s = SHORTEST_S
        while not self._client.check(keys):
            if self._over and self._client.check([self._over]):
                raise dist.DistStoreError(bytes(self._client.get(self._over)).decode())
            if time.monotonic() > ends_s:
                raise dist.DistStoreError(f"{' and '.join(keys)} did not come in time")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_S)
