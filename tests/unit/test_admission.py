"""Whether a Ray cluster admits a run, and what the error says; a server stands for the cluster."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from pipeline.errors import GraphError
from pipeline.executors import admission
from pipeline.executors.admission import check_admission


@contextmanager
def cluster(token: str | None) -> Iterator[str]:
    """A cluster that requires this token, or none."""

    def answer(request: bytes, context: Any) -> bytes:
        said = dict(context.invocation_metadata()).get("authorization")
        if token and said != f"Bearer {token}":
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "InvalidAuthToken")
        return b""

    class Handler(grpc.GenericRpcHandler):
        def service(self, details: Any) -> Any:
            return grpc.unary_unary_rpc_method_handler(answer) if details.method == admission.REQUEST else None

    server = grpc.server(ThreadPoolExecutor(1), [Handler()])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()


@pytest.fixture
def home(tmp_path: Path) -> dict[str, str]:
    """The environment of a user whose home has the token "mine"."""
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("mine\n")
    return {"HOME": str(tmp_path)}


ON = {"RAY_AUTH_MODE": "token"}
OFF = {"RAY_AUTH_MODE": "disabled"}


@pytest.mark.parametrize(
    ("token", "variables"),
    [
        (None, OFF),
        ("mine", ON),
        ("mine", {}),
        ("other", {**ON, "RAY_AUTH_TOKEN": "other"}),
        ("mine", {**ON, "RAY_AUTH_TOKEN": ""}),
    ],
)
def test_a_run_with_the_clusters_token_is_admitted(home: dict[str, str], token: str, variables: dict[str, str]) -> None:
    with cluster(token) as address:
        check_admission(address, home | variables)


@pytest.mark.parametrize(
    ("token", "variables", "what", "fix"),
    [
        (None, ON, "the cluster has no token, and this run requires one", "RAY_AUTH_MODE=disabled for the run"),
        (None, {}, "the cluster has no token, and this run requires one", "ray get-auth-token --generate"),
        ("mine", OFF, "the cluster requires a token, and RAY_AUTH_MODE is disabled", "RAY_AUTH_MODE=token, and copy"),
        ("mine", {**ON, "HOME": "/nowhere"}, "requires a token, and this process has none", "or set RAY_AUTH_TOKEN"),
        ("mine", {"HOME": "/nowhere"}, "requires a token, and RAY_AUTH_MODE is not set", "RAY_AUTH_MODE=token, and"),
        ("new", ON, "refuses the token of {HOME}/.ray/auth_token", "copy ~/.ray/auth_token from the machine"),
        ("mine", {**ON, "RAY_AUTH_TOKEN": "old"}, "refuses the token of RAY_AUTH_TOKEN", "from the machine of"),
    ],
)
def test_a_run_without_it_is_told_what_is_missing(
    home: dict[str, str], token: str, variables: dict[str, str], what: str, fix: str
) -> None:
    environment = home | variables
    with cluster(token) as address, pytest.raises(GraphError) as raised:
        check_admission(address, environment)
    (problem,) = raised.value.problems
    assert problem.where == f"--address {address}"
    assert what.format(**environment) in problem.what and fix in problem.fix


def test_an_address_where_nothing_answers(home: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "ANSWER_S", 0.2)
    with pytest.raises(GraphError, match=r"127.0.0.1:1: nothing answers there within 0.2 s"):
        check_admission("127.0.0.1:1", home)


@pytest.mark.parametrize("address", ["auto", "ray://127.0.0.1:1", "local"])
def test_other_addresses_are_left_to_ray(home: dict[str, str], address: str) -> None:
    check_admission(address, home)
