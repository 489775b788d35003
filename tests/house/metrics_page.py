"""docs/metrics.md, made from the code: python -m tests.house.metrics_page > docs/metrics.md"""

import sys

from pushrep.status.metrics import FAMILIES

HEAD = """\
# Metrics

Made from `pushrep/status/metrics.py` by `python -m tests.house.metrics_page`; a test compares the two.

Values are read at each scrape; an append updates its counters once a batch. Names follow Prometheus' guide: sizes in
`_bytes`, times in `_seconds`, moments in `_timestamp_seconds` since 1970, counters `_total`, histograms
`_duration_seconds`. The column `by` says who shows a metric. A registry of your own gets it by `StatusCollector` of
`pushrep.status.metrics`:

- **service**: `Outbox.open(health=...)`, or `StatusCollector(outbox.status)`
- **node**: `pushrep replica serve --metrics`, or `StatusCollector(node.status)`
- **job**, **filter**: `--health` of the apply and the relay job; in a program of your own
  `StatusCollector(lambda: JobStatus(name="billing", counts=consumer.counts))`, of a consumer of `filtering.consumers`
  (`source` is the topic) or of Spark's `CountsListener` (`source` is the query)

How to serve them, and what to watch: [operating.md](operating.md#metrics).

| metric | kind | by | labels | |
|---|---|---|---|---|
"""


def page():
    """The whole page."""
    rows = (
        f"| `{one.name}` | {one.kind} | {one.by} | {', '.join(one.labels)} | {one.help} |" for one in FAMILIES.values()
    )
    return HEAD + "\n".join(rows) + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
