"""Bars and lines as inline SVG. The server makes them, so they need no script; the style sheet has the colours. Pure.

partition_bar      |start ░░ shipped ▓▓ stable ▒▒ end|      one scale for all partitions of a table
sparkline, chart   past values as a line, with gaps for missing values
"""

from collections.abc import Sequence

from markupsafe import Markup

_BAR_WIDTH = 240
_SEEN = 3  # units: the least width of a part, so that it is visible
_SPARK_WIDTH, _SPARK_HEIGHT = 90, 20
_CHART_WIDTH, _CHART_HEIGHT = 640, 120


def partition_bar(start: int, shipped: int | None, stable: int, end: int, *, longest: int) -> Markup:
    """The bar of one log: shipped records, stable records, and the rest. longest: the highest end in the table.

    shipped: None if the outbox ships to no topic. A part that is not empty is at least 3 units wide.
    """
    at = [_scaled(offset, longest) for offset in (start, start if shipped is None else shipped, stable, end)]
    at[1], at[2] = max(at[0], min(at[1], at[3])), max(at[0], min(at[2], at[3]))
    if end > stable:
        at[2] = min(at[2], at[3] - _SEEN)
    if shipped is not None and stable > shipped:
        at[1] = min(at[1], at[2] - _SEEN)
    parts = [
        f'<path class={name} d="M{left} 0H{right}V9H{left}z"/>'
        for name, left, right in zip(("s", "h", "t"), at, at[1:], strict=False)
        if right > left
    ]
    # Attributes without quotes, which HTML allows: a page has hundreds of bars.
    return Markup(  # noqa: S704 - only numbers and constants of this module
        f'<svg class=bar viewBox="-6 0 {_BAR_WIDTH + 6} 9" preserveAspectRatio=none aria-hidden=true>'
        f"{''.join(parts)}</svg>"
    )


def sparkline(values: Sequence[float | None]) -> Markup:
    """A small line of past values, scaled from 0 to the highest."""
    highest = max((value for value in values if value is not None), default=0) or 1
    path = _line(values, highest, _SPARK_WIDTH, _SPARK_HEIGHT)
    return Markup(  # noqa: S704 - as above
        f'<svg class=spark viewBox="0 -1 {_SPARK_WIDTH} {_SPARK_HEIGHT + 2}" aria-hidden=true><path d="{path}"/></svg>'
    )


def chart(values: Sequence[float | None]) -> Markup:
    """A large line of past values; the template adds the scale."""
    highest = max((value for value in values if value is not None), default=0) or 1
    path = _line(values, highest, _CHART_WIDTH, _CHART_HEIGHT)
    return Markup(  # noqa: S704 - as above
        f'<svg class=chart viewBox="0 -2 {_CHART_WIDTH} {_CHART_HEIGHT + 4}" preserveAspectRatio=none '
        f'aria-hidden=true><path class=grid d="M0 0H{_CHART_WIDTH}M0 {_CHART_HEIGHT / 2:g}H{_CHART_WIDTH}'
        f'M0 {_CHART_HEIGHT}H{_CHART_WIDTH}"/><path class=line d="{path}"/></svg>'
    )


def _scaled(offset: int, longest: int) -> int:
    return round(_BAR_WIDTH * offset / max(1, longest))


def _line(values: Sequence[float | None], highest: float, width: int, height: int) -> str:
    """An SVG path. A single value between two missing ones becomes a short line."""
    steps, is_drawing = [], False
    for number, value in enumerate(values):
        if value is None:
            is_drawing = False
            continue
        x, y = width * number / max(1, len(values) - 1), height * (1 - min(1, value / highest))
        steps.append(f"{'L' if is_drawing else 'M'}{x:.1f} {y:.1f}" + ("" if is_drawing else "h.1"))
        is_drawing = True
    return "".join(steps)
