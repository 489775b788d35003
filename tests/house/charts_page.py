"""docs/figures.md and its charts, made from benchmarks/RESULTS.md: python -m tests.house.charts_page

A chart is an SVG of a few kB with the colours of light and dark pages in it, so that `![](figures/append.svg)` shows
the right ones. Bars are medians; the thin line over a bar goes from the least to the most of all rounds.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "figures.md"
CHARTS = ROOT / "docs" / "figures"
_NUMBER = re.compile(r"[\d,.]+")


@dataclass(frozen=True, slots=True)
class Row:
    """A side of a comparison, as RESULTS.md has it."""

    median: float
    least: float
    most: float


def results(text):
    """{command: {table's first words: {side: Row}}} of RESULTS.md."""
    found = {}
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        command = section.partition("\n")[0].strip()
        tables = found.setdefault(command, {})
        for table in re.split(r"^\*\*", section, flags=re.MULTILINE)[1:]:
            rows = tables[table.partition("**")[0]] = {}
            for line in table.splitlines():
                side, *cells = (cell.strip() for cell in line.strip("|").split("|"))
                if len(cells) >= 4 and _NUMBER.fullmatch(cells[0]):
                    rows[side] = Row(*(float(cell.replace(",", "")) for cell in cells[:3]))
    return found


RESULTS = results((ROOT / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8"))


@dataclass(frozen=True, slots=True)
class Chart:
    """`bars`: (label, table, side, is it ours), each of `command`'s tables, by the words that a table begins with."""

    name: str
    title: str
    unit: str
    command: str
    bars: tuple[tuple[str, str, str, bool], ...]
    text: str


def row(command, table, side):
    """The row of a side in the table of this title, or in the only one that begins so."""
    tables = RESULTS[command]
    if table not in tables:
        [table] = [title for title in tables if title.startswith(table)]
    return tables[table][side]


CHARTS_SHOWN = (
    Chart(
        "append",
        "A service hands over one record of 100 B, again and again",
        "records/s, not synced",
        "append_singly",
        (
            ("pushrep Outbox.append", "G1", "append", True),
            ("confluent-kafka produce()", "G1", "confluent-kafka produce()", False),
            ("persist-queue, SQLite without syncs", "G1", "persist-queue's SQLite, no syncs", False),
            ("litequeue", "G1", "litequeue", False),
            ("persist-queue", "G1", "persist-queue", False),
        ),
        "Until all are delivered: the outbox writes to the file system, where records survive a crash of the process; "
        "the client sends to librdkafka's own mock of a cluster.",
    ),
    Chart(
        "lists",
        "Lists of 1 KiB records, synced to disk",
        "records/s, on disk",
        "append_lists",
        (
            ("pushrep append_many", "G3", "append_many", True),
            ("LMDB putmulti", "G3", "LMDB putmulti", False),
            ("RocksDB WriteBatch", "G3", "rocksdict WriteBatch", False),
            ("SQLite, synchronous=FULL", "G3", "SQLite FULL", False),
            ("bare write + fdatasync", "G3", "bare write + fdatasync", False),
        ),
        "The last bar is what the disk gives without any format, checksum or index.",
    ),
    Chart(
        "push",
        "From a service to one other process, checked, written, acknowledged",
        "records/s, not synced",
        "push",
        (
            ("100 B: pushrep to a replica", "G7: to one replica, 100 B", "push", True),
            ("100 B: produce() to a broker", "G7: to one replica, 100 B", "produce()", False),
            ("1 KiB: pushrep to a replica", "G7: to one replica, 1024 B", "push", True),
            ("1 KiB: produce() to a broker", "G7: to one replica, 1024 B", "produce()", False),
        ),
        "Over loopback. Ours in batches of 256 KiB; the peer is one warm Kafka broker, acks=1 and a linger of 5 ms.",
    ),
    Chart(
        "replay",
        "The past again, as records of 100 B",
        "records/s",
        "replay_kafka",
        (
            ("pushrep, from a directory", "G15: as records, 100 B", "replay of a directory", True),
            ("pushrep, from a node", "G15: as records, 100 B", "replay of a node", True),
            ("confluent-kafka consume()", "G15: as records, 100 B", "consume()", False),
        ),
        "A replay decodes and checks each batch, as the consumer does.",
    ),
    Chart(
        "filter",
        "A Spark stream of 4 million new keys, duplicates removed",
        "records/s",
        "spark_filter",
        (
            ("ReplayFilteredBatches", "every row is new, beside", "ReplayFilteredBatches", True),
            ("dropDuplicates", "every row is new, beside", "dropDuplicates", False),
            ("dropDuplicatesWithinWatermark", "every row is new, beside", "dropDuplicatesWithinWatermark", False),
        ),
        "The filter keeps a number for each producer and source partition, `dropDuplicates` a row a key, in RocksDB.",
    ),
    Chart(
        "takeover",
        "kill -9 of the leader to the next acknowledged record",
        "s, less is better",
        "takeover",
        (
            ("pushrep standby", "kill -9", "standby", True),
            ("Kafka broker", "kill -9", "Kafka broker", False),
        ),
        "Both are set to notice a death after 3 s.",
    ),
)


def short(value):
    """A number as a chart says it: 2.5 M, 543 k, 3.71."""
    for limit, word in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if value >= limit:
            return f"{value / limit:.3g}{word}"
    return f"{value:.3g}"


STYLE = """<style>
.page{fill:#ffffff}.text{fill:#1f2328}.soft{fill:#59636e}.ours{fill:#0969da}.peer{fill:#afb8c1}.range{stroke:#1f2328}
@media (prefers-color-scheme:dark){.page{fill:#0d1117}.text{fill:#f0f6fc}.soft{fill:#9198a1}.ours{fill:#4493f8}
.peer{fill:#656c76}.range{stroke:#f0f6fc}}
text{font:14px system-ui,sans-serif}.title{font-weight:600;font-size:16px}.small{font-size:12px}
</style>"""


def svg(chart):
    """The chart as SVG: a bar a side, its label left, its median right."""
    rows = [(label, row(chart.command, table, side), ours) for label, table, side, ours in chart.bars]
    left, width, step, top = 270, 400, 30, 62
    height = top + step * len(rows) + 10
    scale = width / max(one.most for _, one, _ in rows)
    said = "; ".join(f"{label} {short(one.median)}" for label, one, _ in rows)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 {height}" role="img">',
        f"<title>{escape(chart.title)}, {escape(chart.unit)}: {escape(said)}</title>",
        STYLE,
        f'<rect class="page" width="760" height="{height}" rx="6"/>',
        f'<text class="text title" x="16" y="28">{escape(chart.title)}</text>',
        f'<text class="soft small" x="16" y="47">{escape(chart.unit)}; median, and the range of all rounds</text>',
    ]
    for number, (label, one, ours) in enumerate(rows):
        y = top + step * number
        middle = y + 10
        end = left + max(one.most, one.median) * scale
        parts += [
            f'<text class="text" x="{left - 10}" y="{middle + 5}" text-anchor="end">{escape(label)}</text>',
            f'<path class="{"ours" if ours else "peer"}" d="M{left} {y}h{one.median * scale:.1f}v20H{left}z"/>',
            f'<path class="range" d="M{left + one.least * scale:.1f} {middle}H{end:.1f}" stroke-width="1.5"/>',
            f'<text class="text" x="{end + 8:.1f}" y="{middle + 5}">{short(one.median)}</text>',
        ]
    return "\n".join([*parts, "</svg>"]) + "\n"


@dataclass(frozen=True, slots=True)
class Line:
    """A row of a table of figures: ours beside one peer or more, each (how the reader knows it, side)."""

    what: str
    command: str
    table: str
    ours: str
    peers: tuple[tuple[str, str], ...]
    unit: str = "/s"

    def __str__(self):
        own = short(row(self.command, self.table, self.ours).median)
        peers = (
            f"{label} {short(row(self.command, self.table, side).median)}{self.unit}" for label, side in self.peers
        )
        return f"| {self.what} | {own}{self.unit} | {', '.join(peers)} | `{self.command}` |"


OF_README = (
    Line("lists of 1 KiB records, synced to disk", "append_lists", "G3", "append_many", (("SQLite", "SQLite FULL"),)),
    Line(
        "1 KiB records to one replica", "push", "G7: to one replica, 1024 B", "push", (("a Kafka broker", "produce()"),)
    ),
    Line(
        "Spark, 4 million new keys",
        "spark_filter",
        "every row is new, beside",
        "ReplayFilteredBatches",
        (("`dropDuplicates`", "dropDuplicates"),),
    ),
    Line(
        "`kill -9` to the next acknowledgement",
        "takeover",
        "kill -9",
        "standby",
        (("a Kafka broker", "Kafka broker"),),
        " s",
    ),
)
"""The four figures of README.md."""

BEHIND = (
    Line(
        "one record alone until it is acknowledged, p50",
        "push",
        "G9: one record alone",
        "push",
        (("Kafka", "produce() + flush()"),),
        " ms",
    ),
    Line(
        "append of one record of 100 B, not synced",
        "append_singly",
        "G1",
        "append",
        (("`produce()`", "confluent-kafka produce()"),),
    ),
    Line(
        "Spark's filter, to a sink that costs nothing",
        "spark_filter",
        "every row is new",
        "ReplayFilteredBatches",
        (("no filter", "no filter"),),
    ),
    Line(
        "the same to a Parquet table",
        "spark_filter",
        "every row is new, to a Parquet table",
        "ReplayFilteredBatches",
        (("no filter", "no filter"),),
    ),
    Line(
        "the filter as an operator",
        "spark_operator",
        "operator form, every row is new",
        "filter_replays",
        (("no filter", "no filter"),),
    ),
    Line(
        "a new replica is filled, 1 GiB",
        "replay_catch_up",
        "catch-up of a replica, 1 GiB",
        "push to a new replica",
        (("a bare copy", "bare copy with CRC"),),
        "B/s",
    ),
)
"""Where a peer is ahead."""


def page():
    """The whole page."""
    parts = [
        "# Figures",
        "",
        "From [RESULTS.md](../benchmarks/RESULTS.md) by `python -m tests.house.charts_page`; a test compares both.",
        "Each benchmark runs both sides in turn on one machine of two cores, so the ratio is what counts.",
        "Any of them again: `make bench`, or `python -m benchmarks NAME`.",
    ]
    for chart in CHARTS_SHOWN:
        parts += [
            "",
            f"## {chart.title}",
            "",
            f"![{chart.title}](figures/{chart.name}.svg)",
            "",
            f"{chart.text} `python -m benchmarks {chart.command}`",
        ]
    parts += ["", "## Where a peer is ahead", "", "| | pushrep | peer | `python -m benchmarks` |", "|---|--:|--:|---|"]
    parts += [*map(str, BEHIND), ""]
    return "\n".join(parts)


if __name__ == "__main__":
    CHARTS.mkdir(exist_ok=True)
    PAGE.write_text(page(), encoding="utf-8")
    for chart in CHARTS_SHOWN:
        (CHARTS / f"{chart.name}.svg").write_text(svg(chart), encoding="utf-8")
