"""Transports of weights: interface (base.py), Sluice's (listed.py), check of a user's (check.py), implementations."""

from ops.refit.transports.base import Receiver, Record, Sender, Transport
from ops.refit.transports.check import is_taken, missing, register, wrong_parameters
from ops.refit.transports.listed import P2P, TRANSPORTS, Broadcast, Gloo, Tree

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
    "is_taken",
    "missing",
    "register",
    "wrong_parameters",
]
