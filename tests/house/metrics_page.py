"""docs/metrics.md, made from the code: python -m tests.house.metrics_page > docs/metrics.md"""

import sys

from pushrep.metrics import FAMILIES

HEAD = """\
# Metrics

Made from `pushrep/metrics.py` by `python -m tests.house.metrics_page`; a test compares the two.

Values are read at each scrape; an append updates its counters once a batch. Names follow Prometheus' guide: sizes in
`_bytes`, times in `_seconds`, moments in `_timestamp_seconds` since 1970, counters `_total`, histograms
`_duration_seconds`. What shows each metric (column `by`):

- **service**: `Outbox.open(health=...)`, or `OutboxCollector(outbox)` of `pushrep.outbox.metrics` in your registry
- **node**: `pushrep replica serve --metrics`, or `NodeCollector(node)` of `pushrep.replicate.node_metrics`
- **slots**: `SlotsCollector(directory)` of `pushrep.outbox.metrics`, for all worker slots by their files
- **filter**: `FilterCollector(consumer, name="billing")` of `pushrep.metrics`, of a consumer of
  `filtering.consumers` (`source` is the topic) or of Spark's `CountsListener` (`source` is the query)
- **job**: `--health` of the apply and the relay job, with those of its filter; in a program of your own
  `ProcessCollector(problems)` of `pushrep.metrics`
- **startpoints**: `StartpointCollector(store)` of `pushrep.metrics`

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
