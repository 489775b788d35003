"""Rows and marks in one transaction of a database: `from spark_jobs.sql import SqlTable`."""

from spark_jobs.sql.dialects import BadSqlTable
from spark_jobs.sql.table import SqlTable

__all__ = ["BadSqlTable", "SqlTable"]
