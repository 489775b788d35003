"""The root of every error that spark_jobs raises; each room names its own below it, for what the caller does next.

Raised inside Spark's planner or workers they reach the driver as text in Spark's own exception; so the message names
the option, field or file, and what to do.
"""


class SparkJobError(Exception):
    """Anything a job, source or column expression of spark_jobs refuses or fails at."""
