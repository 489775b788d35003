"""The control socket of an open outbox: how the command line reaches a service that runs.

    ControlServer(directory, calls)         in the service; Outbox.open makes one
    ask(directory, "status")                from any process of the same user

protocol.py is what is said, place.py where the socket lies, server.py and client.py the two sides.
"""

from pushrep.outbox.control.client import ask
from pushrep.outbox.control.errors import BadControlMessage, CallRefused, ControlError, NobodyAnswers
from pushrep.outbox.control.server import ControlServer

__all__ = ["BadControlMessage", "CallRefused", "ControlError", "ControlServer", "NobodyAnswers", "ask"]
