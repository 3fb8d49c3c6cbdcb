"""The picture of benchmarks.ddp: step times by model and variant, one step side by side, overhead by parameters."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any
from xml.sax.saxutils import escape

# M. Okabe, K. Ito, "Color Universal Design": colours that colour-blind readers can tell apart.
_COLOURS = ("#999", "#56B4E9", "#0072B2", "#853", "#009E73", "#D55E00", "#000", "#CC79A7", "#E69F00")
_ROWS = {"compute": "#56B4E9", "pack": "#E69F00", "reduce": "#CC79A7"}
_PARTS = {"forward": "#9AD0F2", "wait": "#DDDDDD"}
_WIDTH, _LEFT, _ROW, _GAP = 980, 190, 15, 26


def draw(result: Mapping[str, Any]) -> str:
    """An SVG of what --json wrote."""
    page = _Page()
    environment = result.get("environment", {})
    about = ", ".join(f"{key} {environment[key]}" for key in ("cpu", "cores", "ranks", "torch") if key in environment)
    page.text(10, page.y, f"A data-parallel step: {about}", size=14)
    page.y += 24
    for model, samples in result.get("seconds", {}).items():
        _bars(page, model, samples)
    for model, variants in result.get("timelines", {}).items():
        _timelines(page, model, variants)
    if "parameters" in result:
        _overhead(page, result["parameters"])
    return page.svg()


class _Page:
    def __init__(self) -> None:
        self.parts: list[str] = []
        self.y = 22.0

    def text(self, x: float, y: float, words: str, *, size: int = 11, anchor: str = "start") -> None:
        self.parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}">{escape(words)}</text>'
        )

    def box(self, x: float, y: float, width: float, height: float, colour: str, tip: str) -> None:
        self.parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.6):.1f}" height="{height:.1f}" fill="{colour}">'
            f"<title>{escape(tip)}</title></rect>"
        )

    def line(self, points: Sequence[tuple[float, float]], colour: str, width: float = 1) -> None:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}"/>')

    def svg(self) -> str:
        size = f'width="{_WIDTH + 20}" height="{self.y + 10:.0f}"'
        style = 'font-family="Helvetica, Arial, sans-serif"'
        body = "\n".join(self.parts)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>\n'
            f'<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'
        )


def _bars(page: _Page, model: str, samples: Mapping[str, Sequence[float]]) -> None:
    medians = {name: statistics.median(times) * 1e3 for name, times in samples.items()}
    widest = max(statistics.quantiles(times, n=4)[2] * 1e3 for times in samples.values())
    scale = (_WIDTH - _LEFT - 70) / max(widest, *medians.values())
    page.text(10, page.y, model, size=12)
    page.y += 6
    base = medians.get("compute only", 0.0)
    for i, (name, median) in enumerate(medians.items()):
        low, _, high = (q * 1e3 for q in statistics.quantiles(samples[name], n=4))
        y = page.y + i * _ROW
        page.text(_LEFT - 6, y + 11, name, anchor="end")
        page.box(_LEFT, y + 2, median * scale, _ROW - 4, _bar_colour(name), f"{name}: {median:.2f} ms")
        page.line([(_LEFT + low * scale, y + _ROW / 2), (_LEFT + high * scale, y + _ROW / 2)], "#333333", 1.5)
        page.text(_LEFT + max(median, high) * scale + 5, y + 11, f"{median:.2f} ms", size=10)
    bottom = page.y + len(medians) * _ROW
    if base:
        page.line([(_LEFT + base * scale, page.y), (_LEFT + base * scale, bottom)], "#333333", 0.7)
    page.y = bottom + _GAP


def _bar_colour(variant: str) -> str:
    """Stock, ours and the bounds are to be told apart, not eleven variants."""
    if variant.startswith("stock"):
        return "#56B4E9"
    if variant.startswith("hpcomm"):
        return "#D55E00" if variant == "hpcomm" else "#F2B48C"
    return "#999999"


def _timelines(page: _Page, model: str, variants: Mapping[str, Sequence[Sequence[Any]]]) -> None:
    longest = max(end for spans in variants.values() for _, _, _, end in spans)
    scale = (_WIDTH - _LEFT - 20) / longest
    page.text(10, page.y, f"One step of {model}, rank 0; what stock DDP copies is in its backward", size=12)
    page.y += 8
    for variant, spans in variants.items():
        for row, colour in _ROWS.items():
            inside = [span for span in spans if span[0] == row]
            if not inside:
                continue
            page.text(_LEFT - 6, page.y + 12, f"{variant}: {row}", anchor="end")
            for i, (_, name, begin, end) in enumerate(inside):
                height = _ROW - 5 if row == "reduce" and i % 2 else _ROW - 3
                tip = f"{name}: {begin * 1e3:.2f} to {end * 1e3:.2f} ms"
                shade = _PARTS.get(name, colour)
                page.box(_LEFT + begin * scale, page.y + 2, (end - begin) * scale - 0.5, height, shade, tip)
                if (end - begin) * scale > 6.5 * len(name):
                    page.text(_LEFT + begin * scale + 3, page.y + 11, name, size=9)
            page.y += _ROW
        page.y += 5
    step = 10 ** math.floor(math.log10(longest))
    step = step / 5 if longest / step < 3 else step
    for i in range(int(longest / step) + 1):
        x = _LEFT + i * step * scale
        page.line([(x, page.y - 2), (x, page.y + 3)], "#333333")
        page.text(x, page.y + 14, f"{i * step * 1e3:g} ms", size=9, anchor="middle")
    page.y += 20 + _GAP


def _overhead(page: _Page, results: Mapping[str, Mapping[str, Sequence[float]]]) -> None:
    """Microseconds a parameter above compute only; both axes are logarithmic."""
    height = 220.0
    bare = results["compute only"]
    curves: dict[str, list[tuple[float, float]]] = {}
    for variant, by_count in results.items():
        if variant == "compute only":
            continue
        for count, times in by_count.items():
            above = statistics.median(t - b for t, b in zip(times, bare[count], strict=True)) / float(count) * 1e6
            curves.setdefault(variant, []).append((float(count), max(above, 0.1)))
    xs = [math.log10(x) for curve in curves.values() for x, _ in curve]
    ys = [math.log10(y) for curve in curves.values() for _, y in curve]
    low, high = math.floor(min(ys)), math.ceil(max(ys))
    width = _WIDTH - _LEFT - 200

    def place(x: float, y: float) -> tuple[float, float]:
        across = (math.log10(x) - min(xs)) / max(max(xs) - min(xs), 1e-9)
        return _LEFT + width * across, top + height * (1 - (math.log10(y) - low) / max(high - low, 1))

    page.text(10, page.y, "Microseconds of a step a parameter above compute only, by number of parameters", size=12)
    top = page.y + 10
    for power in range(low, high + 1):
        _, y = place(10 ** min(xs), 10.0**power)
        page.line([(_LEFT, y), (_LEFT + width, y)], "#dddddd")
        page.text(_LEFT - 6, y + 4, f"{10.0**power:g} us", size=10, anchor="end")
    labels = sorted((place(*curve[-1])[1], i, name) for i, (name, curve) in enumerate(curves.items()))
    last = top
    for after, (y, i, name) in enumerate(labels, 1):
        colour = _COLOURS[i % len(_COLOURS)]
        page.line([place(*point) for point in list(curves.values())[i]], colour, 2)
        last = max(last + 13, min(y, top + height - 13 * (len(labels) - after)))
        page.text(_LEFT + width + 8, last + 4, name)
        page.line([(_LEFT + width, y), (_LEFT + width + 6, last)], colour)
    for x in sorted({x for curve in curves.values() for x, _ in curve}):
        page.text(place(x, 10.0**low)[0], top + height + 14, f"{x:g}", size=10, anchor="middle")
    page.y = max(top + height + 20, last + 10) + _GAP
