"""`python -m benchmarks.pairs --against TREE [ROW ...]`: what this code costs beside an older one (G22).

    pair:   old process  x   x   x ...      turns of some 50 ms in turn, all threads' processor time; who begins changes
            new process    x   x   x ...    a pair's ratio: the median of old ÷ new over its turns
    row:    the mean of the pairs' ratios, and Student's interval of 95 % around it: processes differ by more than turns

TREE is a checkout of the older commit (`git worktree add`); it runs with this interpreter and its packages. A row holds
if the interval's lower end reaches the goal, fails if its upper end does not, and else says "not resolved".
"""

import math
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from benchmarks.harness import scratch
from benchmarks.pairs_child import ROWS

HERE = Path(__file__).parent
GOAL = 0.97
# Student's t for 95 %, two-sided, by degrees of freedom.
_T95 = {9: 2.262, 10: 2.228, 11: 2.201, 14: 2.145, 19: 2.093, 24: 2.064, 29: 2.045}


@click.command(help=__doc__)
@click.argument("rows", nargs=-1, metavar="[ROW ...]", type=click.Choice(list(ROWS)))
@click.option("--against", required=True, type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--pairs", default=10, show_default=True, type=click.IntRange(10), help="Pairs of processes.")
@click.option("--turns", default=12, show_default=True, type=click.IntRange(3), help="Turns of each in a pair.")
def main(rows: Sequence[str], against: Path, pairs: int, turns: int) -> None:
    this = HERE.parent
    print(f"{pairs} pairs of processes, {turns} turns each; load {os.getloadavg()[0]:.1f}")
    print("| row | old, ms | new, ms | old ÷ new | 95 % | goal ≥ 0.97 |")
    print("|---|--:|--:|--:|--:|---|")
    for row in rows or ROWS:
        ratios, old_s, new_s = [], [], []
        for number in range(pairs):
            sides = (against, this) if number % 2 else (this, against)
            times = dict(zip(sides, _pair(row, sides, turns), strict=True))
            ratios.append(statistics.median(a / b for a, b in zip(times[against], times[this], strict=True)))
            old_s += times[against]
            new_s += times[this]
        print(_line(row, old_s, new_s, ratios), flush=True)
    print(f"load {os.getloadavg()[0]:.1f}")


def _pair(row: str, sides: Sequence[Path], turns: int) -> list[list[float]]:
    """Processor seconds of each side's turns."""
    with scratch("pairs") as root:
        children = []
        try:
            for number, tree in enumerate(sides):
                path = root / str(number)
                path.mkdir()
                children.append(_Child(row, tree, path))
            for child in children:
                child.answer()
            for _ in range(turns):
                for child in children:
                    child.turn()
        finally:
            for child in children:
                child.end()
        return [child.seconds for child in children]


class _Child:
    def __init__(self, row: str, tree: Path, path: Path) -> None:
        command = [sys.executable, str(HERE / "pairs_child.py"), row]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=path,
            env=os.environ | {"PYTHONPATH": str(tree)},
        )
        self.seconds: list[float] = []

    def turn(self) -> None:
        assert self._process.stdin is not None, "it was asked for"
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        self.seconds.append(float(self.answer()))

    def answer(self) -> str:
        assert self._process.stdout is not None, "it was asked for"
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._process.args} ended")
        return line

    def end(self) -> None:
        self._process.communicate()


def _line(row: str, old_s: list[float], new_s: list[float], ratios: list[float]) -> str:
    logs = [math.log(ratio) for ratio in ratios]
    spread = statistics.stdev(logs) / math.sqrt(len(logs))
    t95 = _T95[max(count for count in _T95 if count < len(logs))]
    middle = statistics.mean(logs)
    low, high = math.exp(middle - t95 * spread), math.exp(middle + t95 * spread)
    told = "holds" if low >= GOAL else "fails" if high < GOAL else "not resolved"
    shown = " | ".join(f"{1000 * statistics.median(side):.1f}" for side in (old_s, new_s))
    return f"| {row} | {shown} | {math.exp(middle):.3f} | {low:.3f} to {high:.3f} | {told} |"


if __name__ == "__main__":
    main()
