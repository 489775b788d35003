"""Frames: size, kind of message, an Avro header, and unchanged record batches. Big-endian.

    0        4         6         8                12     13             16           20
    | size   | api key | version | correlation id | kind | header bytes | header CRC | Avro header | record batches
      u32      u16       u16       u32              u8     u24            u32

The size counts from byte 4. The CRC-32C covers bytes 0-15 and the header, so that a flipped bit moves no watermark; the
batches have their own. Errors are raised as early as possible: for a size above the limit before anything is stored,
for others once the header is complete and before its first record byte. A peer can make us hold at most `_GROWTH` times
the bytes that it has sent. Kafka's shape (api key, version, correlation id); kind, CRC and header size are ours.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Generic, NamedTuple, TypeAlias, TypeVar

from pushrep.crc32c import crc32c_extend, crc32c_value
from pushrep.errors import BadArgument, PushrepError

T = TypeVar("T")

_PREFIX = struct.Struct(">IHHIII")
_BEFORE_CRC = struct.Struct(">IHHII")
_CRC = struct.Struct(">I")
PREFIX_BYTES = 20
_SIZE_ENDS_AT = 4
_CRC_AT = 16
_HEADER_BYTES_MASK = 0xFF_FFFF
_FIRST_BYTES = 64 << 10  # a body's first buffer; it then grows fourfold as it fills, so that claims cost no memory
_GROWTH = 4
_SCRATCH_BYTES = 64 << 10
SPARE_BYTES = 6 << 20  # a request of 4 MiB from a file behind others from memory
_HEAD_BYTES = 512  # more than prefix and header of a request for one partition
assert _PREFIX.size == PREFIX_BYTES == _BEFORE_CRC.size + _CRC.size, "formats/protocol.md promises 20 bytes"


class ProtocolError(PushrepError):
    """The peer broke the protocol: nothing it sends can be trusted any more. Log `reason` and close the connection."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"{reason}; the connection has to be closed")
        self.reason = reason


class FrameKind(IntEnum):
    """A request has a response; a response and an event have none."""

    REQUEST = 0
    RESPONSE = 1
    EVENT = 2


class Prefix(NamedTuple):
    """The first 20 bytes. size: the number of bytes after it."""

    size: int
    api_key: int
    version: int
    correlation_id: int
    kind: int
    header_bytes: int
    crc: int

    @property
    def place(self) -> str:
        """Which frame it is, for errors."""
        return f"api key {self.api_key} version {self.version} kind {self.kind}"

    @property
    def body_bytes(self) -> int:
        """The bytes of the record batches."""
        return self.size - (PREFIX_BYTES - _SIZE_ENDS_AT) - self.header_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameLimits:
    """Limits of a peer's frames. Raises BadArgument for limits that no frame fits into."""

    frame_bytes_max: int = 64 << 20
    header_bytes_max: int = 1 << 20

    def __post_init__(self) -> None:
        if not PREFIX_BYTES <= self.header_bytes_max <= _HEADER_BYTES_MASK:
            raise BadArgument("header_bytes_max", f"{self.header_bytes_max} is not from {PREFIX_BYTES} to 2**24 - 1")
        if not self.header_bytes_max + PREFIX_BYTES <= self.frame_bytes_max < 1 << 31:
            raise BadArgument(
                "frame_bytes_max", f"{self.frame_bytes_max} is not from header_bytes_max + 20 to 2**31 - 1"
            )


def frame_head(place: tuple[int, int], version: int, correlation_id: int, header: bytes, body_bytes: int) -> bytes:
    """The bytes of a frame before its record batches; `place` is (api key, kind)."""
    api_key, kind = place
    header_bytes = len(header)
    size = PREFIX_BYTES - _SIZE_ENDS_AT + header_bytes + body_bytes
    start = _BEFORE_CRC.pack(size, api_key, version, correlation_id, kind << 24 | header_bytes)
    return b"".join((start, _CRC.pack(crc32c_extend(crc32c_value(start), header)), header))


def read_prefix(data: bytes | bytearray | memoryview, position: int, limits: FrameLimits) -> Prefix:
    """The prefix at `position`, which has its 20 bytes. Raises ProtocolError."""
    size, api_key, version, correlation_id, packed, crc = _PREFIX.unpack_from(data, position)
    kind, header_bytes = packed >> 24, packed & _HEADER_BYTES_MASK
    if size > limits.frame_bytes_max - _SIZE_ENDS_AT:
        raise _too_large(size + _SIZE_ENDS_AT, limits.frame_bytes_max, "frame_bytes_max")
    if header_bytes > limits.header_bytes_max:
        raise _too_large(header_bytes, limits.header_bytes_max, "header_bytes_max")
    if size < PREFIX_BYTES - _SIZE_ENDS_AT + header_bytes:
        raise ProtocolError(f"a frame of {size} bytes has no room for a header of {header_bytes}")
    return Prefix(size, api_key, version, correlation_id, kind, header_bytes, crc)


def _too_large(size: int, limit: int, setting: str) -> ProtocolError:
    return ProtocolError(f"a size of {size} bytes exceeds {setting} = {limit}")


Memory: TypeAlias = Callable[[], memoryview | None]
"""Provides memory for a large body: SPARE_BYTES with old contents, free again when the last view is dropped; None if
there is none now, and the reader makes its own.
"""


class OpenedFrame(NamedTuple, Generic[T]):
    """A frame whose header was decoded; `finish` makes the message from the bytes that follow."""

    body_bytes: int
    finish: Callable[[memoryview], T]


class FrameReader(Generic[T]):
    """Bytes in, messages out, in pieces of any size. `open_frame(prefix, header)` decodes a header, or refuses it.

    Feed it what was read, or let the network write straight into it: `get_buffer`, `buffer_updated`, as asyncio's
    BufferedProtocol has them. After the first error the stream is dead: messages before it were delivered, `failure` is
    set, and every further call raises it.

    memory: for large bodies, in views; without it each body gets its own. hold: called when the prefix of a frame of
    more than 64 KiB is known and not all of it is there, before memory is taken for the rest; it may wait, or raise
    ProtocolError.
    """

    def __init__(
        self,
        open_frame: Callable[[Prefix, bytes], OpenedFrame[T]],
        limits: FrameLimits,
        memory: Memory | None = None,
        hold: Callable[[Prefix], object] | None = None,
    ) -> None:
        self._open_frame, self._limits, self._memory, self.hold = open_frame, limits, memory, hold
        self._head = bytearray()  # prefix and header, until both are whole
        self._opened: OpenedFrame[T] | None = None
        self._body: bytearray | memoryview = bytearray()
        self._body_size = self._body_filled = 0
        self._scratch: bytearray | None = None
        self._is_bulky = False  # whether the last frame's records had a buffer of their own
        self.failure: ProtocolError | None = None

    @property
    def held_bytes(self) -> int:
        """The memory of an incomplete frame."""
        return len(self._head) + (len(self._body) if isinstance(self._body, bytearray) else self._body_filled)

    def drop(self) -> None:
        """Give back all memory: the connection is over. The reader and what it calls hold each other, so without this
        only the garbage collector would.
        """
        self._head, self._body, self._opened, self._scratch = bytearray(), bytearray(), None, None

    def feed(self, data: bytes) -> list[T]:
        """The messages that `data` completes. Records may point into `data`, so don't change it.

        Raises ProtocolError; if good messages came before it in `data`, they are returned and the next call raises it.
        """
        if self.failure is not None:
            raise self.failure
        found: list[T] = []
        view, at, end = memoryview(data), 0, len(data)
        try:
            while at < end:
                at = self._take_body(view, at, found) if self._opened is not None else self._take_head(view, at, found)
        except ProtocolError as error:
            self.failure = error
            self._head, self._body, self._opened = bytearray(), bytearray(), None
            if not found:
                raise
        return found

    def get_buffer(self) -> memoryview:
        """Where the network may write next, for a large body its own memory; then call `buffer_updated`."""
        if self._opened is not None:
            return memoryview(self._grown())[self._body_filled : self._body_size]
        if self._scratch is None:
            self._scratch = bytearray(_SCRATCH_BYTES)
        # After a large body usually another follows; bytes of it that are read together with its header have to be
        # copied.
        return memoryview(self._scratch)[: _HEAD_BYTES if self._is_bulky and not self._head else None]

    def buffer_updated(self, count: int) -> list[T]:
        """The messages that are whole after `count` bytes were written into `get_buffer()`. Raises as `feed` does."""
        if self._opened is None or self.failure is not None:
            return self.feed(bytes(memoryview(self._scratch or b"")[:count]))
        found: list[T] = []
        self._body_filled += count
        self._finish_if_whole(found)
        return found

    def _take_head(self, view: memoryview, at: int, found: list[T]) -> int:
        """Take prefix and header from `at` on, and the body if it is complete; returns the position after them."""
        if not self._head and len(view) - at >= PREFIX_BYTES:
            prefix = read_prefix(view, at, self._limits)
            header_ends = at + PREFIX_BYTES + prefix.header_bytes
            if header_ends <= len(view):
                opened = self._checked(prefix, bytes(view[at:header_ends]))
                body_ends = header_ends + opened.body_bytes
                if body_ends <= len(view):
                    found.append(opened.finish(view[header_ends:body_ends].toreadonly()))
                    return body_ends
                self._hold_if_large(prefix)
                self._begin_body(opened)
                return header_ends
        return self._fill_head(view, at, found)

    def _fill_head(self, view: memoryview, at: int, found: list[T]) -> int:
        missing = PREFIX_BYTES - len(self._head)
        if missing > 0:
            self._head += view[at : at + missing]
            at = min(at + missing, len(view))
            if len(self._head) < PREFIX_BYTES:
                self._refuse_size_early()
                return at
            self._hold_if_large(read_prefix(self._head, 0, self._limits))
        prefix = read_prefix(self._head, 0, self._limits)
        missing = PREFIX_BYTES + prefix.header_bytes - len(self._head)
        if missing > 0:
            self._head += view[at : at + missing]
            at = min(at + missing, len(view))
        if len(self._head) == PREFIX_BYTES + prefix.header_bytes:
            opened = self._checked(prefix, bytes(self._head))
            self._head = bytearray()
            self._begin_body(opened)
            self._finish_if_whole(found)
        return at

    def _hold_if_large(self, prefix: Prefix) -> None:
        if self.hold is not None and prefix.size > _FIRST_BYTES:
            self.hold(prefix)

    def _refuse_size_early(self) -> None:
        if len(self._head) >= _SIZE_ENDS_AT:
            size = int.from_bytes(self._head[:_SIZE_ENDS_AT])
            if size > self._limits.frame_bytes_max - _SIZE_ENDS_AT:
                raise _too_large(size + _SIZE_ENDS_AT, self._limits.frame_bytes_max, "frame_bytes_max")

    def _checked(self, prefix: Prefix, head: bytes) -> OpenedFrame[T]:
        header = head[PREFIX_BYTES:]
        if crc32c_extend(crc32c_value(head[:_CRC_AT]), header) != prefix.crc:
            raise ProtocolError("the CRC of the header does not match")
        return self._open_frame(prefix, header)

    def _begin_body(self, opened: OpenedFrame[T]) -> None:
        size = opened.body_bytes
        self._opened, self._body_size, self._body_filled = opened, size, 0
        self._is_bulky = size > _FIRST_BYTES
        spare = self._memory() if self._memory is not None and _FIRST_BYTES < size <= SPARE_BYTES else None
        self._body = spare if spare is not None else bytearray(min(size, _FIRST_BYTES))

    def _grown(self) -> bytearray | memoryview:
        if self._body_filled == len(self._body):
            # A new one, because the old one can't grow while a view of it from get_buffer exists.
            grown = bytearray(min(self._body_size, _GROWTH * len(self._body)))
            grown[: self._body_filled] = self._body
            self._body = grown
        return self._body

    def _take_body(self, view: memoryview, at: int, found: list[T]) -> int:
        while at < len(view) and self._body_filled < self._body_size:
            body = self._grown()
            count = min(len(body) - self._body_filled, self._body_size - self._body_filled, len(view) - at)
            body[self._body_filled : self._body_filled + count] = view[at : at + count]
            self._body_filled += count
            at += count
        self._finish_if_whole(found)
        return at

    def _finish_if_whole(self, found: list[T]) -> None:
        if self._opened is not None and self._body_filled == self._body_size:
            opened, body = self._opened, self._body
            self._opened, self._body = None, bytearray()
            found.append(opened.finish(memoryview(body)[: self._body_size].toreadonly()))
