"""What a partitioner refuses, named for what the caller does next; the fields are for code."""

from typing import Any


class PartitionerError(Exception):
    """The root of every error of this package."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Rebuilt from message and fields, since the constructors take the fields and not the message."""
        return _rebuilt, (type(self), self.args, self.__dict__)


def _rebuilt(kind: type[PartitionerError], args: tuple[Any, ...], fields: dict[str, Any]) -> PartitionerError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(fields)
    return error


class BadPartitionerSetting(PartitionerError, ValueError):
    """A setting or argument is outside its range: correct it."""

    def __init__(self, setting: str, value: object, allowed: str) -> None:
        super().__init__(f"{setting}={value!r}: {setting} is {allowed}")
        self.setting, self.value, self.allowed = setting, value, allowed


class KeyNotStreamMetadata(PartitionerError):
    """The key says no source partition: send stream metadata as the key, or choose `fallback="default"`.

    With the fallback, too, a key is bytes or None: what the broker will see.
    """

    def __init__(self, why: str, remedy: str = 'send it packed, or set fallback="default"') -> None:
        super().__init__(f"the key is not stream metadata ({why}); {remedy}")
        self.why = why


class TopicShrunk(PartitionerError):
    """The topic has fewer partitions than were pinned, so it is another topic now: raise the PID epoch for it."""

    def __init__(self, pinned: int, partitions: int) -> None:
        super().__init__(
            f"partition_count={pinned} is pinned but the topic has {partitions} partitions: this is another topic; "
            "give it a partitioner of its own and a new PID epoch"
        )
        self.pinned, self.partitions = pinned, partitions
