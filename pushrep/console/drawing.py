"""Bars and lines as inline SVG. The server makes them, so they need no script; the style sheet has the colours. Pure.

partition_bar      |start ░░ shipped ▓▓ stable ▒▒ end|      one scale for all partitions of a table
sparkline, chart   past values as a line over time, with gaps for missing values; the template adds the scales
"""

from collections.abc import Iterator, Sequence

from markupsafe import Markup

Points = Sequence[tuple[float, float | None]]
"""(seconds ago, value or None), the newest last."""
_BAR_WIDTH = 240
_SEEN = 3  # units: the least width of a part, so that it is visible
_SPARK_WIDTH, _SPARK_HEIGHT = 90, 20
_CHART_WIDTH, _CHART_HEIGHT = 640, 120


def partition_bar(start: int, shipped: int | None, stable: int, end: int, *, longest: int) -> Markup:
    """The bar of one log: shipped records, stable records, and the rest. longest: the highest end in the table.

    shipped: None if the outbox ships to no topic: then stable records are drawn as shipped ones, for nothing more
    happens to them. A part that is not empty is at least 3 units wide.
    """
    at = [_scaled(offset, longest) for offset in (start, stable if shipped is None else shipped, stable, end)]
    at[1], at[2] = max(at[0], min(at[1], at[3])), max(at[0], min(at[2], at[3]))
    if end > stable:
        at[2] = min(at[2], at[3] - _SEEN)
    at[1] = min(at[1], at[2] - _SEEN if shipped is not None and stable > shipped else at[2])
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


def sparkline(points: Points) -> Markup:
    """A small line of past values, from 0 to a quarter above the highest."""
    top = 1.25 * max((value for _, value in points if value is not None), default=0)
    path = _line(points, max((ago for ago, _ in points), default=0), top, _SPARK_WIDTH, _SPARK_HEIGHT)
    return Markup(  # noqa: S704 - as above
        f'<svg class=spark viewBox="0 -1 {_SPARK_WIDTH} {_SPARK_HEIGHT + 2}" aria-hidden=true><path d="{path}"/></svg>'
    )


def chart(points: Points, past_s: float, top: float) -> Markup:
    """A large line of the values of the last `past_s` seconds, from 0 to `top`."""
    path = _line(points, past_s, top, _CHART_WIDTH, _CHART_HEIGHT)
    return Markup(  # noqa: S704 - as above
        f'<svg class=chart viewBox="0 -2 {_CHART_WIDTH} {_CHART_HEIGHT + 4}" preserveAspectRatio=none '
        f'aria-hidden=true><path class=grid d="M0 0H{_CHART_WIDTH}M0 {_CHART_HEIGHT / 2:g}H{_CHART_WIDTH}'
        f'M0 {_CHART_HEIGHT}H{_CHART_WIDTH}"/><path class=line d="{path}"/></svg>'
    )


def _scaled(offset: int, longest: int) -> int:
    return round(_BAR_WIDTH * offset / max(1, longest))


def _line(points: Points, past_s: float, top: float, width: int, height: int) -> str:
    """An SVG path. A single value between two missing ones becomes a short line."""

    def steps() -> Iterator[str]:
        is_drawing = False
        for ago_s, value in points:
            if value is not None:
                x, y = width * (1 - ago_s / (past_s or 1)), height * (1 - value / (top or 1))
                yield f"L{x:.1f} {y:.1f}" if is_drawing else f"M{x:.1f} {y:.1f}h.1"
            is_drawing = value is not None

    return "".join(steps())
