"""A peer's protocol errors, which close the connection.

ProtocolError          the peer's bytes: log `reason`, close the connection
  FrameTooLarge          a size above the limit; nothing of it was buffered
  MalformedFrame         the 20 bytes before the header, or the header's CRC
  MalformedMessage       the Avro header: not this schema, or a value out of its range
  UnknownCall            an api key, version or kind that is not spoken here
  UnsupportedVersion     the server does not speak a call in our version
  UnexpectedAnswer       an answer that no request waits for
"""

from pushrep.errors import PushrepError


class ProtocolError(PushrepError):
    """The peer broke the protocol: nothing it sends can be trusted any more. Log `reason` and close the connection."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"{reason}; the connection has to be closed")
        self.reason = reason


class FrameTooLarge(ProtocolError):
    """The peer announces `size` bytes where `limit` are allowed by `setting`; none of them was kept."""

    def __init__(self, size: int, limit: int, setting: str) -> None:
        super().__init__(f"a size of {size} bytes exceeds {setting} = {limit}")
        self.size, self.limit, self.setting = size, limit, setting


class MalformedFrame(ProtocolError):
    """The bytes are no frame of this protocol: another protocol, a damaged stream, or TLS where none is expected."""


class MalformedMessage(ProtocolError):
    """The header of a frame of `call` is not what its schema says, or a value in it is impossible."""

    def __init__(self, call: str, why: str) -> None:
        super().__init__(f"{call}: {why}")
        self.call, self.why = call, why


class UnknownCall(ProtocolError):
    """Nobody here speaks `api_key` in `version` as this kind of frame: ApiVersions answers what is spoken."""

    def __init__(self, api_key: int, version: int, kind: int, why: str) -> None:
        super().__init__(f"api key {api_key} version {version} kind {kind}: {why}")
        self.api_key, self.version, self.kind = api_key, version, kind


class UnexpectedAnswer(ProtocolError):
    """A frame answers `correlation_id`, and no request with that number waits for it."""

    def __init__(self, correlation_id: int, why: str) -> None:
        super().__init__(f"answer to {correlation_id}: {why}")
        self.correlation_id = correlation_id


class UnsupportedVersion(ProtocolError):
    """The server does not speak `call` in `ours`, our version of it. theirs: its (oldest, newest); None for no such
    call.
    """

    def __init__(self, call: str, ours: int, theirs: tuple[int, int] | None) -> None:
        spoken = f"versions {theirs[0]} to {theirs[1]}" if theirs is not None else "no version"
        super().__init__(f"{call}: we speak version {ours}, the peer {spoken}: install the same pushrep on both sides")
        self.call, self.ours, self.theirs = call, ours, theirs


class SchemaMismatch(PushrepError):
    """A class and its .avsc file disagree: this installation is broken, and nothing was started."""


class TooManyInFlight(PushrepError):
    """`limit` requests wait for their answers already: send when one has come."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"{limit} requests are in flight already: wait for an answer")
        self.limit = limit
