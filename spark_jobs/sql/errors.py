"""What a SQL table refuses, named for what the caller does next; the fields are for code."""

from spark_jobs.errors import SparkJobError


class BadSqlTable(SparkJobError):
    """A setting of the table, or a column of the rows, can't be used; the message names it."""

    def __init__(self, setting: str, value: object, why: str) -> None:
        super().__init__(f"{setting}={value!r}: {why}")
        self.setting, self.value, self.why = setting, value, why


class MarksTaken(SparkJobError):
    """Another driver has committed this batch of this query: two run at once, or a checkpoint was copied. End one."""

    def __init__(self, location: str, query_id: str, batch_id: int) -> None:
        super().__init__(
            f"{location} already holds batch {batch_id} of query {query_id}, with other marks: another driver runs "
            "this query. Nothing of this batch was written; end one of the two"
        )
        self.location, self.query_id, self.batch_id = location, query_id, batch_id


class BatchNotStaged(SparkJobError):
    """Marks came without their rows: use the table as the handler of the very filter whose marks store it is."""

    def __init__(self, location: str, query_id: str, batch_id: int) -> None:
        super().__init__(
            f"marks of batch {batch_id} of query {query_id} came to {location} before its rows: give "
            "ReplayFilteredBatches the table as handler and as marks"
        )
        self.location, self.query_id, self.batch_id = location, query_id, batch_id
