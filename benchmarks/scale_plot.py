"""Lines over two logarithmic axes, as a small SVG: the same for the same numbers.

Colours are readable on white and on black; text takes the colour of a grey.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from xml.sax.saxutils import escape

if TYPE_CHECKING:
    from collections.abc import Sequence

WIDTH: Final = 640
HEIGHT: Final = 360
LEFT: Final = 70
RIGHT: Final = 150
TOP: Final = 30
BOTTOM: Final = 45
COLOURS: Final = ("#1f77b4", "#d95f02", "#2ca02c", "#c51b7d", "#8c6bb1", "#7f7f7f")


@dataclass(frozen=True)
class Curve:
    name: str
    points: Sequence[tuple[float, float]]
    """Both above 0."""
    is_dashed: bool = False


@dataclass(frozen=True)
class Axis:
    """From ``low`` to ``high``, powers of ten, over ``start`` to ``stop`` in pixels."""

    title: str
    low: float
    high: float
    start: float
    stop: float

    def at(self, value: float) -> float:
        """The pixel of a value, inside of the axis."""
        span = math.log10(self.high / self.low)
        share = math.log10(max(value, self.low) / self.low) / span
        return self.start + min(share, 1.0) * (self.stop - self.start)

    @property
    def ticks(self) -> list[float]:
        first, last = round(math.log10(self.low)), round(math.log10(self.high))
        return [10.0**power for power in range(first, last + 1)]


def drawn(
    title: str,
    across: tuple[str, float, float],
    up: tuple[str, float, float],
    curves: Sequence[Curve],
) -> str:
    """The picture.

    Args:
        across, up: Title, and the powers of ten between which the axis goes.
    """
    x = Axis(*across, LEFT, WIDTH - RIGHT)
    y = Axis(*up, HEIGHT - BOTTOM, TOP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="11" fill="#808080">',
        _text(LEFT, 16, title, 'font-size="13"'),
        *_grid(x, y),
        *[_curve(curve, x, y, place) for place, curve in enumerate(curves)],
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _grid(x: Axis, y: Axis) -> list[str]:
    across = [
        f'<path d="M{x.at(tick):.1f} {y.start}V{y.stop}" stroke="#80808040"/>'
        + _text(x.at(tick), y.start + 15, _number(tick), 'text-anchor="middle"')
        for tick in x.ticks
    ]
    up = [
        f'<path d="M{x.start} {y.at(tick):.1f}H{x.stop}" stroke="#80808040"/>'
        + _text(x.start - 6, y.at(tick) + 4, _number(tick), 'text-anchor="end"')
        for tick in y.ticks
    ]
    middle = (x.start + x.stop) / 2
    return [
        *across,
        *up,
        _text(middle, y.start + 34, x.title, 'text-anchor="middle"'),
        _text(4, TOP - 4, y.title, ""),
    ]


def _curve(curve: Curve, x: Axis, y: Axis, place: int) -> str:
    colour = COLOURS[place % len(COLOURS)]
    points = " ".join([f"{x.at(a):.1f},{y.at(b):.1f}" for a, b in curve.points])
    dash = ' stroke-dasharray="5 4"' if curve.is_dashed else ""
    line = f'<polyline points="{points}" fill="none" stroke="{colour}"{dash}/>'
    above = TOP + 12 + 18 * place
    return (
        f'{line}<path d="M{x.stop + 8} {above - 4}h16" stroke="{colour}"{dash}/>'
        + _text(x.stop + 28, above, curve.name, "")
    )


def _text(x: float, y: float, words: str, how: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {how}>{escape(words)}</text>'


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1 else f"{value:g}"
