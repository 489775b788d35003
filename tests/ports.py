"""Ports that a test reserves while no process listens on them, so that a program can be restarted at its address."""

import socket


def reserve(host="127.0.0.1", port=0):
    """A port of this machine (0: any), reserved by the returned socket until that is closed.

    The socket is bound and does not listen: a program that listens with SO_REUSEADDR gets the port, connections are
    refused meanwhile, and the system gives it to no program that lets the system choose a port.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind((host, port))
    return held
