"""Sending parts of frames over sockets."""

import os
import socket
import ssl
from collections.abc import Sequence
from typing import TypeAlias, TypeGuard

from pushrep.env import Socket
from pushrep.env.network import Address as Address  # noqa: PLC0414 - where programs import it from
from pushrep.wire.values import FileSlice, Part

AnySocket: TypeAlias = Socket | ssl.SSLSocket
Piece: TypeAlias = memoryview | FileSlice

_READ_BYTES = 128 << 10
_PARTS_MAX = 512  # below IOV_MAX, which is 1024 on Linux
_MORE = getattr(socket, "MSG_MORE", 0)  # Linux has it


def pieces_of(parts: Sequence[Part]) -> list[Piece]:
    """The parts of a frame as `send_some` takes them."""
    pieces: list[Piece] = []
    for part in parts:
        if isinstance(part, FileSlice):
            if part.size_bytes:
                pieces.append(part)
        elif len(part):
            pieces.append(memoryview(part).cast("B"))
    return pieces


def bytes_in_files(pieces: Sequence[Piece]) -> int:
    """The bytes of the pieces that are in files."""
    return sum([piece.size_bytes for piece in pieces if isinstance(piece, FileSlice)])


def send_some(sock: AnySocket, pieces: list[Piece]) -> int:
    """Send from the front of `pieces`, removing what was sent; returns the bytes. Raises as `send`."""
    first = pieces[0]
    if isinstance(first, FileSlice):
        sent = _send_slice(sock, first)
        if sent < first.size_bytes:
            pieces[0] = FileSlice(first.file, first.position + sent, first.size_bytes - sent)
        else:
            del pieces[0]
        return sent
    views = _views_in_front(pieces)
    if not _is_plain(sock):  # a record of TLS is encrypted as one piece: no sendmsg
        sent = sock.send(first) if isinstance(sock, ssl.SSLSocket) else sock.sendmsg(views)
    elif len(views) < len(pieces):
        sent = sock.sendmsg(views, (), _MORE)  # else the peer would be woken for the head alone
    else:
        sent = sock.sendmsg(views)
    left, gone = sent, 0
    while gone < len(views) and left >= len(views[gone]):
        left -= len(views[gone])
        gone += 1
    del pieces[:gone]
    if left:
        pieces[0] = views[gone][left:]
    return sent


def _views_in_front(pieces: list[Piece]) -> list[memoryview]:
    views = []
    for piece in pieces[:_PARTS_MAX]:
        if not isinstance(piece, memoryview):
            break
        views.append(piece)
    return views


def _is_plain(sock: AnySocket) -> TypeGuard[socket.socket]:
    """Whether it is a real socket without TLS: a simulated one has no descriptor, and TLS encrypts in memory."""
    return isinstance(sock, socket.socket) and not isinstance(sock, ssl.SSLSocket)


def _send_slice(sock: AnySocket, part: FileSlice) -> int:
    if _is_plain(sock) and sock.gettimeout() == 0:
        sent = os.sendfile(sock.fileno(), part.file.fileno(), part.position, part.size_bytes)
    else:  # a wait may time out
        data = part.file.read_at(min(part.size_bytes, _READ_BYTES), part.position)
        sent = sock.send(memoryview(data)) if data else 0
    if sent == 0:  # the file was cut below the slice, so its frame can't be finished on this connection
        raise ConnectionError(f"{part.size_bytes} bytes at {part.position} are not there any more")
    return sent


def send_all(sock: AnySocket, parts: Sequence[Part]) -> None:
    """Send a frame on a blocking socket."""
    pieces = pieces_of(parts)
    while pieces:
        send_some(sock, pieces)
