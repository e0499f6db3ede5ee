"""Access control: pure decisions about a request before anything is read. Loopback, one token, GET, this address only.

The printed address contains the token; it is exchanged for a cookie that other sites cannot send.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Mapping

NAME = re.compile(r"[A-Za-z0-9_-]{1,64}", re.ASCII)  # of a run, as folders of runs are named
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


def refusal(method: str, headers: Mapping[str, str], port: int) -> tuple[int, str] | None:
    """Return (status, reason) if a request is rejected regardless of its sender, else None."""
    if method not in ("GET", "HEAD"):
        return 405, "this server is read-only: use GET"
    hosts = {f"127.0.0.1:{port}", f"localhost:{port}", f"[::1]:{port}"}
    if headers.get("Host") not in hosts:
        return 421, "this server accepts requests to its own address only"
    origin = headers.get("Origin")
    if origin is not None and origin not in {f"http://{host}" for host in hosts}:
        return 403, "the request comes from another site"
    if headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin"):
        return 403, "the request comes from another site"
    return None


def knows(token: str, given: str | None) -> bool:
    """Return whether the given text is the token."""
    return given is not None and hmac.compare_digest(token.encode(), given.encode())


def is_run_name(name: str) -> bool:
    """Return whether it is a valid name of a run directory."""
    return NAME.fullmatch(name) is not None
