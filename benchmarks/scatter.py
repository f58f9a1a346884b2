"""A log-log scatter of predicted over measured values as a self-contained SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence

WIDTH, HEIGHT, MARGIN = 640, 480, 56
COLOURS = {"fit": "#8a8f98", "check": "#1f6feb"}


def scatter_svg(points: Sequence[tuple[float, float, str]]) -> str:
    """``points``: (measured s, predicted s, set). Lines: equal, and 25 % to both sides."""
    values = [value for measured, predicted, _ in points for value in (measured, predicted)] or [1.0, 10.0]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))

    def x(value: float) -> float:
        return MARGIN + (math.log10(value) - low) / (high - low) * (WIDTH - MARGIN - 16)

    def y(value: float) -> float:
        return HEIGHT - MARGIN - (math.log10(value) - low) / (high - low) * (HEIGHT - MARGIN - 16)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
    ]
    for power in range(low, high + 1):
        at = 10.0**power
        parts.append(f'<line x1="{x(at):.1f}" y1="{y(10.0**low):.1f}" x2="{x(at):.1f}" y2="{y(10.0**high):.1f}" stroke="#e5e7eb"/>')
        parts.append(f'<line x1="{x(10.0**low):.1f}" y1="{y(at):.1f}" x2="{x(10.0**high):.1f}" y2="{y(at):.1f}" stroke="#e5e7eb"/>')
        parts.append(f'<text x="{x(at):.1f}" y="{HEIGHT - MARGIN + 18}" text-anchor="middle">{at:g}</text>')
        parts.append(f'<text x="{MARGIN - 6}" y="{y(at) + 4:.1f}" text-anchor="end">{at:g}</text>')
    first, last = 10.0**low, 10.0**high
    for factor, dash in ((1.0, ""), (1.25, "4 4"), (0.8, "4 4")):
        start, end = max(first, first / factor), min(last, last / factor)
        parts.append(
            f'<line x1="{x(start):.1f}" y1="{y(start * factor):.1f}" x2="{x(end):.1f}" y2="{y(end * factor):.1f}" '
            f'stroke="#111827" stroke-width="1" stroke-dasharray="{dash}"/>'
        )
    for measured, predicted, group in sorted(points, key=lambda point: point[2], reverse=True):
        parts.append(f'<circle cx="{x(measured):.1f}" cy="{y(predicted):.1f}" r="2.6" fill="{COLOURS[group]}" fill-opacity="0.6"/>')
    parts.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 12}" text-anchor="middle">measured step time [s]</text>')
    parts.append(f'<text x="14" y="{HEIGHT / 2}" text-anchor="middle" transform="rotate(-90 14 {HEIGHT / 2})">predicted [s]</text>')
    for index, (group, colour) in enumerate(COLOURS.items()):
        parts.append(f'<circle cx="{MARGIN + 20}" cy="{30 + 18 * index}" r="4" fill="{colour}"/>')
        parts.append(f'<text x="{MARGIN + 30}" y="{34 + 18 * index}">{group} sources</text>')
    parts.append("</svg>")
    return "\n".join(parts) + "\n"
