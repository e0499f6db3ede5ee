"""Transports of weights: the interface (base.py), Sluice's transports (listed.py), and their implementations."""

from ops.refit.transports.base import Receiver, Record, Sender, Transport
from ops.refit.transports.listed import TRANSPORTS, missing, register

__all__ = ["TRANSPORTS", "Receiver", "Record", "Sender", "Transport", "missing", "register"]
