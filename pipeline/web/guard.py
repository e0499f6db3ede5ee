"""Access control: pure decisions about a request before anything is read. Loopback names, one token, GET.

The printed address contains the token; it is exchanged for a cookie that other sites cannot send.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

LOOPBACK = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:[0-9]{1,5})?", re.ASCII)  # with any port: that of a tunnel
LONGEST = 255  # bytes of a folder's name
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
    host = headers.get("Host", "")
    if LOOPBACK.fullmatch(host) is None:
        return 421, (
            f"this server answers on its machine's loopback address only: from elsewhere, "
            f"ssh -L {port}:127.0.0.1:{port} MACHINE and open the printed address"
        )
    if headers.get("Origin", f"http://{host}") != f"http://{host}":
        return 403, "the request comes from another site"
    if headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin"):
        return 403, "the request comes from another site"
    return None


def knows(token: str, given: str | None) -> bool:
    """Return whether the given text is the token."""
    return given is not None and hmac.compare_digest(token.encode(), given.encode(errors="replace"))


def whole(text: str) -> int | None:
    """Return the number that a text of up to 18 digits 0 to 9 stands for, else None."""
    return int(text) if re.fullmatch(r"[0-9]{1,18}", text, re.ASCII) else None


def outward(folder: Path, names: Iterable[str]) -> str | None:
    """Return the first of the files and folders in a folder that is a link, or None. A run has none: what it would lead
    to may be anything that the server can read."""
    return next((name for name in names if (folder / name).is_symlink()), None)


def is_run_name(name: str) -> bool:
    """Return whether it can be the name of a run directory: one folder's name, of characters that can be shown."""
    return name not in ("", ".", "..") and "/" not in name and name.isprintable() and len(name.encode()) <= LONGEST
