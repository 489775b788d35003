"""Rows and marks in one transaction of a SQL database: `SqlTable` is a handler and a marks store at once."""

from spark_jobs.sql.dialects import BadSqlTable, MarksTaken
from spark_jobs.sql.table import SqlTable

__all__ = ["BadSqlTable", "MarksTaken", "SqlTable"]
