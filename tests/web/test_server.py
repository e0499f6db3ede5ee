"""What the server returns: its own page for GET with the token. All other requests are refused without data."""

import base64
import json
import os
import re
import shutil
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
from aiohttp.web import HTTPNotFound

from pipeline.errors import GraphError
from pipeline.view import _folder
from pipeline.web import pages
from pipeline.web.exports import EXPORTS
from pipeline.web.server import Server
from tests.web.folders import SECRET, run_of
from tests.web.serving import serving

pytestmark = pytest.mark.journal_expected
ROUTES = (
    "/", "/static/app.js", "/api/runs", "/api/runs/run/about", "/api/runs/run/findings", "/api/runs/run/advice",
    "/api/runs/run/samples", "/api/runs/run/prompts", "/api/runs/run/comparison?other=run",
    "/api/runs/run/export/spans", "/api/runs/run/export/metrics", "/api/runs/run/export/perfetto",
    "/api/runs/run/export/html",
)  # fmt: skip


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    run_of(folder / "run", steps=3)
    (folder / "link").symlink_to(folder / "run")
    (folder / "run" / "outside").symlink_to("/etc")
    run_of(folder / "linked", steps=1).metrics.unlink()
    (folder / "linked" / "metrics.jsonl").symlink_to(folder / "run" / "metrics.jsonl")
    with serving(folder) as made:
        yield made


@pytest.mark.parametrize("route", ROUTES)
def test_every_route_answers_its_own_page(served, route):
    status, headers, body = served.ask(route)
    assert status == 200 and body
    assert (
        "default-src 'none'" in headers["content-security-policy"]
        and "unsafe" not in headers["content-security-policy"]
    )
    assert headers["x-content-type-options"] == "nosniff" and headers["cache-control"] == "no-store"
    assert "access-control-allow-origin" not in headers
    for _, packed, _ in re.findall(rb'(id="packed">)(.+?)(</script>)', body):
        body += zlib.decompress(base64.b64decode(packed), wbits=zlib.MAX_WBITS + 16)
    assert SECRET.encode() not in body and served.token.encode() not in body
    assert b"--api-key" in body or not route.endswith(("/about", "/html"))


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_nothing_but_get_is_taken(served, route, method):
    assert served.ask(route, method)[0] == 405


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example"}, 421),
        ({"Host": "evil.example:{port}"}, 421),
        ({"Host": "localhost.:{port}"}, 421),
        ({"Host": "127.0.0.1:{port}@evil.example"}, 421),
        ({"Host": "127.0.0.1.evil.example:{port}"}, 421),
        ({"Host": ""}, 421),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://127.0.0.1:1"}, 403),
        ({"Origin": "http://localhost:{port}"}, 403),
        ({"Sec_Fetch_Site": "cross-site"}, 403),
        ({"Sec_Fetch_Site": "same-site"}, 403),
        ({"Cookie": ""}, 401),
        ({"Cookie": "sluice_{port}=wrong"}, 401),
        ({"Cookie": "sluice_{port}="}, 401),
        ({"Cookie": "sluice_{port}=\xff\xfe"}, 401),
        ({"Cookie": "sluice_1={token}"}, 401),
    ],
)
def test_strangers_are_refused(served, route, headers, status):
    given = {name: value.format(port=served.port, token=served.token) for name, value in headers.items()}
    found, _, body = served.ask(route, **given)
    assert found == status or (not given.get("Host", "-") and found == 400)
    assert len(body) < 200 and served.token.encode() not in body


def test_the_token_is_exchanged_for_a_cookie_that_scripts_and_other_sites_do_not_get(served):
    status, headers, _ = served.ask(f"/?token={served.token}", Cookie="")
    assert status == 303 and headers["location"] == "/"
    cookie = headers["set-cookie"]
    assert "HttpOnly" in cookie and "SameSite=Strict" in cookie and served.cookie in cookie
    assert served.ask("/?token=wrong", Cookie="")[0] == 401


@pytest.mark.parametrize(
    "path",
    [
        "/api/runs/../about", "/api/runs/%2e%2e/about", "/api/runs/%252e%252e/about", "/api/runs/..%2frun/about",
        "/api/runs/run%00/about", "/api/runs/link/about", "/api/runs/r%C3%BCn/about",
        "/api/runs/" + "a" * 300 + "/about", "/api/runs/%0A/about", "/api/runs/%ED%B2%80/about", "/api/runs/./about",
        "/api/runs/run%2f..%2frun/about", "/api/runs/run/../../etc/passwd", "/api/runs/run/nothing", "/api/runs//about",
        "/static/../server.py", "/static/%2e%2e/server.py", "/static/vendor/../../server.py", "/static//etc/passwd",
        "/api/runs/run/comparison?other=../run", "/api/runs/run/comparison?other=link", "/api/runs/run/export/exe",
        "/api/runs/run/events?from=-1", "/api/runs/run/events?from=" + "9" * 30, "/api/runs/run/events?from=x",
        "/api/runs/run/events?from=%C2%B2", "/api/runs/run/samples?step=%C2%B2", "/api/runs/run/samples?step=-1",
        "/api/runs/linked/about", "/api/runs/linked/export/spans", "/api/runs/run/comparison?other=linked",
        "/nothing",
    ],
)  # fmt: skip
def test_paths_lead_nowhere_else(served, path):
    status, _, body = served.ask(path)
    assert status in (400, 404) and len(body) < 300 and b"root:" not in body


def test_rows_come_from_the_byte_that_is_asked_for(served):
    import socket

    def events(last: int) -> tuple[list[int], bytes]:
        with socket.create_connection(("127.0.0.1", served.port), 10) as stream:
            lines = ["GET /api/runs/run/events HTTP/1.1", f"Host: 127.0.0.1:{served.port}", f"Cookie: {served.cookie}"]
            stream.sendall("\r\n".join([*lines, f"Last-Event-ID: {last}", "", ""]).encode())
            got = b""
            while got.count(b"event: now") < 2:  # before the rows, and after them
                got += stream.recv(1 << 16)
        return [int(line[4:]) for line in got.splitlines() if line.startswith(b"id: ")], got

    ids, _ = events(0)
    assert ids
    again, text = events(ids[-1])
    assert not again and b"event: rows" not in text
    assert b"event: again" in events(ids[-1] + 1000)[1]


@pytest.mark.parametrize("name", ["run.json", "plan.json", "events.jsonl", "metrics.jsonl", "samples"])
def test_no_link_in_a_run_is_followed(tmp_path, served, name):
    """Each is a link to what another run has: a page would show it."""
    run_of(tmp_path / "run", steps=1)
    path = tmp_path / "run" / name
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    path.symlink_to(served.folder / "run" / name)
    with pytest.raises(HTTPNotFound, match=f"{name} of this run is a link"):
        Server(tmp_path, "token")._path("run")
    assert pages.runs(tmp_path) == []


def test_a_file_that_cannot_be_read_is_named_in_one_line(tmp_path):
    """Root reads every file, so here it gives that up."""
    run_of(tmp_path / "run", steps=2)
    caps = "-dac_override,-dac_read_search"
    before = ("setpriv", f"--inh-caps={caps}", f"--bounding-set={caps}") if os.geteuid() == 0 else ()
    with serving(tmp_path, before=before) as served:
        for name in ("plan.json", "metrics.jsonl", "events.jsonl", "samples", "."):
            path = tmp_path / "run" / name
            mode = path.stat().st_mode
            path.chmod(0)
            for route in ROUTES[3:]:
                status, _, body = served.ask(route)
                assert status in (200, 404) and (status == 200 or b"\n" not in body), (name, route, body)
                assert status == 404 or name != ".", route
            path.chmod(mode)
        assert served.ask(ROUTES[3])[0] == 200
        for name, damage, kinds in DAMAGED:
            path = tmp_path / "run" / name
            before = path.read_bytes()
            path.write_bytes(damage(before))
            found = {kind: served.ask(f"/api/runs/run/export/{kind}") for kind in EXPORTS}
            assert {kind for kind, (status, _, body) in found.items() if status == 404 and b"\n" not in body} == kinds
            assert all(name.encode() in found[kind][2] for kind in kinds), (name, found)
            path.write_bytes(before)


DAMAGED = (  # a file, what happens to it, and the exports that need it whole
    ("events.jsonl", lambda text: text.replace(b"\n", b"\ngarbage\n", 1), {"html", "perfetto", "spans"}),
    ("metrics.jsonl", lambda text: text + b"{\n", {"html", "perfetto", "metrics"}),
    ("metrics.jsonl", lambda text: text + b'{"step":9,"a":1e999}\n', {"html", "perfetto", "metrics"}),
    ("plan.json", lambda text: text.replace(b'"rollout"', b'"other"'), {"html", "perfetto"}),
)


def test_commands_name_the_folder_as_it_was_given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_of(tmp_path / "my runs" / "run", steps=6)
    run_of(tmp_path / "my runs" / "other", steps=1).run_json.write_text('{"args": {"api_key": "b"}}')
    (tmp_path / "last").symlink_to("my runs/run")
    for given, folder, name in (
        ("my runs", "my runs", ""),
        (tmp_path / "my runs", "my runs", ""),
        ("my runs/run", "my runs", "run"),
        ("my runs/../my runs", "my runs/../my runs", ""),
        ("last", tmp_path / "my runs", "run"),
    ):
        assert _folder(Path(given)) == (Path(folder), name)
    run = Path("my runs", "run")
    resumed = pages.PAGES["about"](run, {})["resume"]
    assert resumed == "python -m pipeline.run GRAPH --executor ray --run-dir 'my runs/run' --resume"
    hints = pages.PAGES["advice"](run, {})["hints"]
    assert hints and all(" 'my runs/run' --" in hint["command"] for hint in hints)
    compared = json.dumps(pages.PAGES["comparison"](run, {"other": "other"}))
    assert SECRET not in compared and '"before": "b"' not in compared


def test_a_tunnel_may_have_another_port(served):
    """As with `ssh -L 9000:127.0.0.1:PORT`."""
    for host in ("127.0.0.1:9000", "localhost:9000", "[::1]:9000", "127.0.0.1"):
        status, headers, _ = served.ask(f"/?token={served.token}", Host=host, Cookie="")
        assert status == 303 and headers["location"] == "/" and served.cookie in headers["set-cookie"]
        assert served.ask("/api/runs", Host=host, Origin=f"http://{host}")[0] == 200
    status, _, body = served.ask("/", Host=f"machine:{served.port}")
    assert status == 421 and f"ssh -L {served.port}:127.0.0.1:{served.port}".encode() in body


def test_an_offset_of_other_digits_is_refused(served):
    status, _, body = served.ask("/api/runs/run/events", Last_Event_ID="\u00b2")
    assert status == 400 and body == b"Last-Event-ID is a byte offset"


def test_the_list_has_the_run_and_no_link(served):
    runs = json.loads(served.ask("/api/runs")[2])
    assert [(run["name"], run["state"], run["step"]) for run in runs] == [("run", "finished", 3)]


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["no-such-folder"], "there is no such folder"),
        (["--port", "70000"], "it is not a port"),
        (["--port", "x"], "expected a whole number"),
        (["--prot", "1"], "did you mean --port?"),
    ],
)
def test_a_wrong_command_says_so(tmp_path, argv, says):
    (tmp_path / "runs").mkdir()
    command = [sys.executable, "-m", "pipeline.view", *argv, "--no-open"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 2 and says in done.stderr and "Traceback" not in done.stderr


def test_a_folder_whose_name_cannot_be_shown_is_refused(tmp_path):
    (tmp_path / "a\tb").mkdir()
    (tmp_path / "a\tb" / "plan.json").write_text("{}")
    with pytest.raises(GraphError, match=r"has a character that cannot be shown.*Fix: rename the folder"):
        _folder(tmp_path / "a\tb")


def test_a_port_that_is_taken_is_told(served, tmp_path):
    command = [sys.executable, "-m", "pipeline.view", str(tmp_path), "--port", str(served.port), "--no-open"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 2 and "cannot listen on it" in done.stderr
