"""What is wrong with an outbox, a node or a job, and how far everything is: one value and its renderers.

    filled by                                                rendered by
    pushrep/outbox/status.py          OutboxStatus            `pushrep status`          text.py
    pushrep/replicate/node_status.py  NodeStatus     Status   `pushrep status --json`   as_dict()
    spark_jobs/jobs/command.py        JobStatus               /readyz                   is_ready, pushrep/health.py
    pushrep/cli/status.py             PlaceStatus             /metrics                  metrics.py, a table of fields
                                                              `pushrep console`         as_dict()

Each filler says its problems by `find_problems`; a renderer finds none. value.py has the value, problem.py the names of
all problems, what each blocks, and what to do about it; pushrep/log/segment_log.py fills what outboxes and nodes share.
"""

from pushrep.status.problem import PROBLEMS, Blocks, Problem, certificate_problems
from pushrep.status.value import Histogram, JobStatus, Leads, PlaceStatus, Status

__all__ = [
    "PROBLEMS",
    "Blocks",
    "Histogram",
    "JobStatus",
    "Leads",
    "PlaceStatus",
    "Problem",
    "Status",
    "certificate_problems",
]
