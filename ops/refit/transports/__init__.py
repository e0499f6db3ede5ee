"""Transports of weights: the interface (base.py), Sluice's transports (listed.py), and their implementations."""

from ops.refit.transports.base import Receiver, Record, Sender, Transport
from ops.refit.transports.listed import P2P, TRANSPORTS, Broadcast, Gloo, Tree, missing, register, wrong_parameters

__all__ = [
    "P2P",
    "TRANSPORTS",
    "Broadcast",
    "Gloo",
    "Receiver",
    "Record",
    "Sender",
    "Transport",
    "Tree",
    "missing",
    "register",
    "wrong_parameters",
]
