"""A user's own transport, as docs/your-own-transport.md shows it: one file outside the repository, no edits to ours."""

import json
import re
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ops.refit.transports import TRANSPORTS, Receiver, Sender, Transport, missing, register
from pipeline import Model, StageError, Task, WorkerGroup
from pipeline.record import trace
from pipeline.rundir import RunDir
from stages import Refit
from stages.backends import ServedWeights
from tests.forked import Command

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = REPOSITORY / "docs" / "your-own-transport.md"
FLAGS = ["--steps", "3", "--warm-start-steps", "10"]


def files(folder: Path) -> list[Path]:
    """Write the graphs of the docs page to a folder and return their paths."""
    found = []
    for name, code in zip(("by_files", "everything"), re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)):
        found.append(folder / f"{name}.py")
        found[-1].write_text(code)
    return found


def run(graph: Path, run_dir: Path, *flags: str) -> RunDir:
    """Run a graph in its own process and return its run directory."""
    words = ["-m", "pipeline.run", str(graph), "--executor", "local", "--run-dir", str(run_dir), *FLAGS, *flags]
    done = Command(*words, cwd=REPOSITORY, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    _, said = done.communicate(timeout=300)
    assert done.returncode == 0, said
    return RunDir(run_dir)


def published(run_dir: RunDir) -> list[tuple[int, str]]:
    """Return the published versions with their weight hashes."""
    read = [event for _, event in trace.read(run_dir.events)]
    return [(event.version, event.sha256) for event in read if isinstance(event, trace.Published)]


@pytest.fixture(scope="module")
def pulled(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, str]]:
    """Return the published versions of the quickstart with its default transport."""
    found = published(run(REPOSITORY / "graphs" / "quickstart.py", tmp_path_factory.mktemp("pulled") / "run"))
    assert [version for version, _ in found] == [0, 1, 2, 3] and len(set(found)) == 4
    return found


@pytest.mark.parametrize("index", [0, 1], ids=["by_files", "everything"])
def test_the_pages_transports_bring_the_weights_that_are_pulled(
    tmp_path: Path, pulled: list[tuple[int, str]], index: int
) -> None:
    graph = files(tmp_path)[index]
    run_dir = run(graph, tmp_path / "run", *(["--folder", str(tmp_path / "weights")] if index == 0 else []))
    assert published(run_dir) == pulled
    steps = [json.loads(line) for line in run_dir.metrics.read_text().splitlines()]
    path = f"refit/path_{['files', 'everything'][index]}"
    assert [step[path] for step in steps if step["step"] > 0] == [1.0] * 3
    if index == 0:
        assert len(list((tmp_path / "weights").iterdir())) == 2, "the last two versions"


class Reads(Receiver):
    """A receiver that reads nothing."""

    def receive(self, meeting: Any, shares: Any, version: int) -> dict[str, float]:
        return {}


class Mail(Transport):
    name = "mail"

    def sender(self) -> Sender:
        return Sender()

    def receiver(self) -> Receiver:
        return Reads()


@pytest.fixture
def registered() -> Iterator[Mail]:
    mail = Mail()
    register(mail)
    yield mail
    del TRANSPORTS["mail"]


POLICY = Model("tiny")
CPU = {name: WorkerGroup(name, backend="torch") for name in ("source", "target")}


def test_a_registered_name_is_found_also_in_a_worker_that_does_not_know_it(
    registered: Mail, monkeypatch: pytest.MonkeyPatch
) -> None:
    refit = Refit(POLICY, **CPU, transport="mail")
    assert not list(refit._objections()) and refit.path(False) is registered
    monkeypatch.delitem(TRANSPORTS, "mail", raising=False)
    assert refit.path(False) is registered
    TRANSPORTS["mail"] = registered


def test_a_name_is_registered_for_one_class() -> None:
    class Other(Mail):
        name = "pull"

    with pytest.raises(ValueError, match="Other has name='pull', which another transport has"):
        register(Other())
    assert type(TRANSPORTS["pull"]) is not Other


@pytest.mark.parametrize("name", ["", "auto", "two words", 7])
def test_a_name_is_a_word(name: Any) -> None:
    assert "a name consists of letters" in missing(type("Own", (Mail,), {"name": name})())


@pytest.mark.parametrize("devices", ["cpu", (), ("tpu",)])
def test_devices_are_cpu_and_cuda(devices: Any) -> None:
    assert f"Own has devices={devices!r}" in missing(type("Own", (Mail,), {"devices": devices})())


def test_both_ends_do_what_the_class_says() -> None:
    assert missing(Mail()) == ""
    carrying = type("Own", (Mail,), {"both_carry": True})()
    assert missing(carrying) == "Own.sender() returns Sender, which does not define send()"
    assert missing(type("Own", (Mail,), {"receiver": lambda self: 7})()) == (
        "Own.receiver() returns int, which does not define receive()"
    )


def test_the_methods_of_both_ends_take_what_they_are_called_with() -> None:
    short = type("Short", (Receiver,), {"receive": lambda self, meeting: {}})
    found = missing(type("Own", (Mail,), {"receiver": lambda self: short()})())
    assert found.startswith(f"Short.receive() must take (meeting, shares, version) ({__file__}:")
    offers = type("Offers", (Sender,), {"offer": lambda self: None})
    assert "Offers.offer() must take (memory)" in missing(type("Own", (Mail,), {"sender": lambda self: offers()})())
    assert "Own.sender() must take no arguments" in missing(type("Own", (Mail,), {"sender": lambda self, rank: 1})())


async def later(*_: Any) -> Any: ...


def one_by_one(*_: Any) -> Any:
    yield


@pytest.mark.parametrize(("method", "says"), [(later, "is async"), (one_by_one, "is a generator")])
@pytest.mark.parametrize("name", ["sender", "receiver", "send", "offer", "receive", "close"])
def test_every_method_returns_its_result_when_it_is_called(name: str, method: Any, says: str) -> None:
    sender = type("Sends", (Sender,), {"send": lambda self, meeting, version: {}, name: method})()
    receiver = type("Receives", (Reads,), {name: method})()
    ends = {"sender": lambda self: sender, "receiver": lambda self: receiver, "both_carry": name == "send"}
    if name in ends:
        ends[name] = method
    found = missing(type("Own", (Mail,), ends)())
    assert f".{name}() {says}, and " in found and found.endswith(f"({__file__}:{method.__code__.co_firstlineno})")


@pytest.mark.parametrize("devices", [3, ([],), property(lambda self: 1 / 0)])
def test_devices_of_another_type_are_no_traceback(devices: Any) -> None:
    assert missing(type("Own", (Mail,), {"devices": devices})()).startswith("Own")


def test_a_transport_of_one_machine_is_refused_between_machines() -> None:
    refit = Refit(POLICY, **CPU, transport=type("Own", (Mail,), {"one_machine": True})())
    assert not refit.meets(True)
    with pytest.raises(StageError, match="has transport='mail' and workers on several machines"):
        refit.meets(False)


@pytest.mark.parametrize("name", ["path_mail", "path_pull", "size_bytes", "offer_ms", "carry_ms"])
@pytest.mark.parametrize("side", ["source", "carrier", "target"])
def test_a_transport_reports_none_of_the_stages_own_metrics(side: str, name: str) -> None:
    record = {"received_bytes": 4.0, name: 7.0}
    engine = SimpleNamespace(
        share=lambda model, transport: SimpleNamespace(record=record),
        carry=lambda model, shares, version, route: record,
        serve=lambda model, shares, version, route: ServedWeights("abc", record),
    )
    rendezvous: Any = SimpleNamespace(
        side=side, is_near=True, meeting=None, offer=id, take=lambda: [SimpleNamespace(model_bytes=4)]
    )
    context: Any = SimpleNamespace(shared={"engine": engine})
    refit, task = Refit(POLICY, **CPU, transport=Mail()), Task(stage="refit", step=0)
    with pytest.raises(StageError, match=f"transport 'mail' returned the metric '{name}'; stage 'refit' reports"):
        refit.setup(context)(rendezvous, task)
    del record[name]
    made = refit.setup(context)(rendezvous, task).metrics
    assert made["received_bytes"] == 4 and made.get("path_mail") == (1.0 if side == "target" else None)


def test_a_transport_that_cannot_be_sent_is_refused() -> None:
    made = Mail()
    made.lock = threading.Lock()  # type: ignore[attr-defined]
    assert missing(made) == "Mail cannot be sent to workers: cannot pickle '_thread.lock' object"


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("both_carries", "both_carry"),
        ("both_carrys", "both_carry"),
        ("one_machines", "one_machine"),
        ("by_loaders", "by_loader"),
        ("keep_copies", "keep_copy"),
        ("device", "devices"),
    ],
)
def test_a_misspelt_attribute_of_a_transport_is_refused(wrong: str, right: str) -> None:
    kind = type("Named", (Mail,), {wrong: True})
    assert missing(kind()) == f"Named defines {wrong}, which nothing uses; the name is {right}"


@pytest.mark.parametrize(
    "name", ["loader", "copy", "carry", "bytes_at_once", "send_buffer", "sends", "machine", "deadline_s"]
)
def test_other_attributes_of_a_transport_are_its_own(name: str) -> None:
    assert missing(type("Named", (Mail,), {name: True})()) == ""
