"""The network interface of an address, and the environment by which gloo and NCCL use it."""

import socket

import pytest

from pipeline.executors import interface

NAMES = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.2", "::1", "[::1]"])
def test_a_loopback_address_is_at_the_loopback_interface(address: str) -> None:
    assert interface.interface_of(address) == "lo"


def test_an_address_of_another_machine_is_at_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    interface.bind("192.0.2.1" if interface.interface_of("192.0.2.1") is None else "198.51.100.1")
    assert not any(map(interface.os.environ.get, NAMES))


def test_gloo_and_nccl_are_bound_unless_the_user_has_done_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "mine")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "")
    monkeypatch.delenv("NCCL_SOCKET_IFNAME")
    interface.bind("127.0.0.2")
    assert [interface.os.environ[name] for name in NAMES] == ["mine", "=lo"]
    assert ("lo", interface.ipaddress.ip_address("127.0.0.1")) in list(interface._held())
    assert {name for name, _ in interface._held()} <= {name for _, name in socket.if_nameindex()}
