"""What reading or building a record batch may refuse, named for what the caller does next."""

from pushrep.errors import PushrepError


class CorruptRecordBatch(PushrepError):
    """These bytes are no whole record batch v2: quarantine them or fetch them again; `reason` says why."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"not a valid record batch: {reason}")
        self.reason = reason


class UnsupportedCodec(PushrepError):
    """The batch is whole, but its attributes name compression `number`, which this version can't read: upgrade."""

    def __init__(self, number: int) -> None:
        super().__init__(
            f"compression {number} is unknown (0 none, 1 gzip, 2 snappy, 3 lz4, 4 zstd): upgrade the reader"
        )
        self.number = number


class RecordTooLarge(PushrepError):
    """A record or batch of `size` bytes exceeds `limit`: split it, or raise the limit where the message says so."""

    def __init__(self, size: int, limit: int, setting: str = "batch_bytes_max") -> None:
        super().__init__(f"{size} bytes exceed {setting} = {limit}: split the data or raise {setting}")
        self.size, self.limit, self.setting = size, limit, setting
