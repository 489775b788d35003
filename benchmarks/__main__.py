"""`python -m benchmarks [NAME ...] [--rounds 5] [--long] [--json FILE] [--write]`: figures beside their peers.

A benchmark is a module in this folder with `run(rounds) -> dict`: one result of `harness.compare`, or several by title;
with --long its `run_long(rounds)`, if it has one. The name of a row (g1, g2 ...) stands for the module that shows it.
"""

import json
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from benchmarks import bare
from benchmarks.harness import machine

HERE = Path(__file__).parent
_NO_ROWS = {"harness", "bare", "push_sides", "ready_made", "pairs", "pairs_child", "flood", "__main__"}
NAMES = sorted(m.name for m in iter_modules([str(HERE)]) if m.name not in _NO_ROWS)
ROWS = {
    "g1": "append_singly",
    "g2": "append_lists",
    "g3": "append_lists",
    "g4": "append_durably",
    "g5": "append_durably",
    "g6": "append_lists",
    "g7": "push",
    "g8": "push_all",
    "g9": "push",
    "g10": "push_long",
    "g11": "ship",
    "g12": "log_open",
    "g13": "log_open",
    "g14": "verify",
    "g15": "replay replay_kafka",
    "g16": "spark_filter",
    "g17": "spark_filter",
    "g18": "filter_batch",
    "g19": "push_idle",
    "g21": "sync_many",
    "g23": "await_receipts",
    "g27": "tables",
}


@click.command(help=__doc__)
@click.argument("names", nargs=-1, metavar="[NAME ...]", type=click.Choice([*NAMES, *ROWS, "all"]))
@click.option("--rounds", default=5, show_default=True, type=click.IntRange(1), help="Counted rounds of every side.")
@click.option("--long", "is_long", is_flag=True, help="The forms that need tens of gigabytes and minutes.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write everything to this file.")
@click.option("--write", is_flag=True, help="Put the tables into benchmarks/RESULTS.md, with command and machine.")
def main(names: tuple[str, ...], rounds: int, json_file: Path | None, *, is_long: bool, write: bool) -> None:
    chosen = (
        NAMES
        if not names or "all" in names
        else sorted({one for name in names for one in ROWS.get(name, name).split()})
    )
    host = machine()
    console = Console(width=110)
    console.print(f"{host['processors']} processors ({host['processor']}), {host['memory_gib']} GiB, {host['system']}")
    bare.touch_memory()
    host["bare"] = bare.figures()
    console.print(bare.told(host["bare"]))
    results: dict[str, Any] = {}
    for name in chosen:
        console.rule(name)
        module = import_module(f"benchmarks.{name}")
        outcome = getattr(module, "run_long" if is_long else "run", module.run)(rounds)
        results[name] = {name: outcome} if "rates" in outcome else outcome
        for title, result in results[name].items():
            console.print(table(title, result))
    if json_file:
        json_file.write_text(json.dumps({"machine": host, "results": results}, indent=1))
    if write:
        for name, parts in results.items():
            form = " --long" if is_long else ""
            command = f"python -m benchmarks {name} --rounds {rounds}{form}"
            replace_section(HERE / "RESULTS.md", name + form, markdown(command, parts, host))


def table(title: str, result: dict[str, Any]) -> Table:
    """One result as a terminal table: a row a side, the ratio of ours to it beside."""
    shown = Table(title=title, title_justify="left")
    for column in ("side", result["unit"], "min", "max", "ours ÷ it", "min", "max", "goal"):
        shown.add_column(column, justify="left" if column == "side" else "right")
    for row in rows(result):
        shown.add_row(*row)
    for note in result.get("notes", []):
        shown.caption = f"{shown.caption}; {note}" if shown.caption else note
    return shown


def rows(result: dict[str, Any]) -> list[list[str]]:
    """Cells of one result, numbers as people read them."""
    lines = []
    for side, rate in result["rates"].items():
        ratio = result["ratios"].get(side)
        cells = [side, *(number(rate[k]) for k in ("median", "min", "max"))]
        cells += [f"{ratio[k]:.2f}" for k in ("median", "min", "max")] if ratio else ["", "", ""]
        lines.append([*cells, goal(ratio) if ratio and "goal" in ratio else ""])
    return lines


def goal(ratio: dict[str, float]) -> str:
    """The goal of a ratio, and whether the median is there."""
    met = ratio["median"] <= ratio["goal"] if ratio.get("at_most") else ratio["median"] >= ratio["goal"]
    return f"{'≤' if ratio.get('at_most') else '≥'} {ratio['goal']:.3g} {'met' if met else 'missed'}"


def number(value: float) -> str:
    """1234567 → 1,234,567; small values keep three digits."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def markdown(command: str, parts: dict[str, Any], host: dict[str, Any]) -> str:
    """The section of RESULTS.md for one benchmark."""
    packages = ", ".join(f"{package} {v}" for package, v in host["packages"].items() if v)
    processors = f"{host['processors']} processors ({host['processor']})"
    text = [
        f"`{command}` on {processors}, {host['memory_gib']} GiB, {host['system']}, Python {host['python']},",
        f"{packages}.",
        f"The bare machine in this run: {bare.told(host['bare'])}.",
    ]
    for title, result in parts.items():
        text += ["", f"**{title}** ({result['unit']}, {result['rounds']} rounds)", ""]
        text += ["| side | median | min | max | ours ÷ it | min | max | goal |", "|---|--:|--:|--:|--:|--:|--:|--:|"]
        text += ["| " + " | ".join(cells) + " |" for cells in rows(result)]
        text += ["", *(f"- {note}" for note in result.get("notes", []))]
    return "\n".join(text).rstrip()


def replace_section(file: Path, name: str, body: str) -> None:
    """Put `body` under the heading `## name`, in place of what stood there."""
    text = file.read_text() if file.exists() else "# Results\n\nWritten by `python -m benchmarks --write`.\n"
    head, *sections = text.rstrip().split("\n## ")
    kept = {section.split("\n", 1)[0]: section for section in sections}
    kept[name] = f"{name}\n\n{body}"
    file.write_text("\n\n## ".join([head.rstrip(), *(kept[key].rstrip() for key in sorted(kept))]) + "\n")


if __name__ == "__main__":
    main()
