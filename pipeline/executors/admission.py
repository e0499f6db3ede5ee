"""Asks a Ray cluster whether it admits this process, before Ray connects and tries for a long time.

    check_admission("10.0.0.1:6379", os.environ)

A run has a token by default (RAY_AUTH_MODE=token), so that nobody else can run code in its workers. A cluster that is
started with plain `ray start` has one only if its user has created one; the two do not work together. Knows where Ray
looks for a token and one request of its protocol; not Ray itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pipeline.errors import GraphError, Problem

REQUEST = "/ray.rpc.NodeInfoGcsService/GetClusterId"  # the first one of every process that connects
ANSWER_S = 10.0
MODE, TOKEN, TOKEN_FILE = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
HOST_PORT = re.compile(r"[^/\s]+:\d+")  # not "auto" or "ray://..."
Answer = Literal["yes", "no", "nothing"]


def check_admission(address: str, environment: Mapping[str, str]) -> None:
    """Raise GraphError if nothing answers at the address, or if tokens do not agree. Other forms of addresses than
    HOST:PORT are left to Ray."""
    if not HOST_PORT.fullmatch(address):
        return
    found = own_token(environment)
    token, where = found or (None, "")
    is_on = environment.get(MODE, "token" if found else "disabled").lower() == "token"
    without = ask(address, None)
    if without == "nothing":
        raise _refused(
            address, f"nothing answers there within {ANSWER_S:g} s", "the run joins the Ray cluster of that address",
            "check the address: that of `ray start --head`, with its port, by default 6379",
        )  # fmt: skip
    if without == "yes" and is_on:
        raise _refused(
            address, "the cluster has no token, and this run requires one",
            "without it, everyone who reaches the cluster's ports can run code there",
            "`ray get-auth-token --generate`, copy ~/.ray/auth_token to every machine and start Ray again; or, if only "
            f"trusted machines reach them, {MODE}=disabled for the run",
        )  # fmt: skip
    if without == "no" and not is_on:
        raise _refused(
            address, f"the cluster requires a token, and {MODE} is {environment.get(MODE, 'not set')}",
            "a process without it is not admitted", f"{MODE}=token, and {_copy()}",
        )  # fmt: skip
    if without == "no" and token is None:
        raise _refused(
            address, "the cluster requires a token, and this process has none", "a process without it is not admitted",
            _copy(),
        )  # fmt: skip
    if without == "no" and ask(address, token) == "no":
        raise _refused(
            address, f"the cluster refuses the token of {where}", "a cluster has one token for all its processes",
            _copy(),
        )  # fmt: skip


def own_token(environment: Mapping[str, str]) -> tuple[str, str] | None:
    """Return the token that Ray finds for this process, and where; None if there is none."""
    if text := environment.get(TOKEN, "").strip():
        return text, TOKEN
    default = Path(environment.get("HOME", "/")) / ".ray" / "auth_token"
    file = Path(environment[TOKEN_FILE]) if environment.get(TOKEN_FILE) else default
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return (text, str(file)) if text else None


def ask(address: str, token: str | None) -> Answer:
    """Return whether the cluster admits a process with this token, or that nothing answers."""
    import grpc

    sent = [("authorization", f"Bearer {token}")] if token else None
    with grpc.insecure_channel(address) as channel:
        try:
            channel.unary_unary(REQUEST)(b"", timeout=ANSWER_S, wait_for_ready=True, metadata=sent)
        except grpc.RpcError as error:
            unauthenticated = error.code() == grpc.StatusCode.UNAUTHENTICATED
            return "no" if unauthenticated else "nothing"
    return "yes"


def _refused(address: str, what: str, why: str, fix: str) -> GraphError:
    return GraphError(Problem(where=f"--address {address}", what=what, why=why, fix=fix))


def _copy() -> str:
    return f"copy ~/.ray/auth_token from the machine of `ray start --head`, or set {TOKEN} or {TOKEN_FILE}"
