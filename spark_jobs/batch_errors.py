"""What a foreachBatch query refuses, each named for what its owner does next."""

from spark_jobs.errors import SparkJobError


class NotInForeachBatch(SparkJobError):
    """There is no streaming query to keep marks for: use `filter_frame` on a batch frame."""

    def __init__(self) -> None:
        super().__init__("not inside foreachBatch: a batch frame is filtered by .filter_frame(df, marks)")


class MarksMissing(SparkJobError):
    """The store lacks the marks of the batch before; going on with empty ones would let every replay through."""

    def __init__(self, location: str, query_id: str, batch_id: int, kept: list[int]) -> None:
        have = f"it has batches {kept[0]} to {kept[-1]}" if kept else "it has none of this query"
        super().__init__(
            f"marks at {location} lack batch {batch_id} of query {query_id}: {have}. Give the store that belongs to "
            "this checkpoint, or begin a fresh checkpoint with adopt=(query, batch), --adopt QUERY:BATCH"
        )
        self.location, self.query_id, self.batch_id, self.kept = location, query_id, batch_id, kept


class MarksOfAnotherQuery(SparkJobError):
    """The store belongs to another query: adopt its marks, or give this query a store of its own."""

    def __init__(self, location: str, owner: str, last: int, query_id: str) -> None:
        super().__init__(
            f"marks at {location} belong to query {owner} (last batch {last}), this is query {query_id}. To go on "
            f"where that one ended begin a fresh checkpoint with adopt=({owner!r}, {last}), --adopt {owner}:{last}; "
            "otherwise choose another place for the marks"
        )
        self.location, self.owner, self.last, self.query_id = location, owner, last, query_id


class CheckpointWentBack(SparkJobError):
    """Spark planned a batch anew that had been stored with other records, and the handler can't take them back."""

    def __init__(self, batch_id: int) -> None:
        super().__init__(
            f"batch {batch_id} was stored with other log ranges: its checkpoint was rolled back. The handler must "
            "remove what it wrote for this batch and later ones: give it a method drop_from(batch_id)"
        )
        self.batch_id = batch_id
