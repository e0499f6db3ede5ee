"""How weights travel: the contract of a transport (base.py), those that Sluice has (listed.py), and how each works."""

from ops.refit.transports.base import Receiver, Record, Sender, Transport
from ops.refit.transports.listed import TRANSPORTS, missing, register

__all__ = ["TRANSPORTS", "Receiver", "Record", "Sender", "Transport", "missing", "register"]
