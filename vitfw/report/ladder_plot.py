"""The ladder as one picture: accuracy of each rung with its noise, over trainable parameters (log scale)."""

import itertools
import math
from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from vitfw.evaluate.ladder import RungResult, bytes_text, mean_and_spread, noise, order_of

SIZE = (960, 630)  # pixels
FRAME = (110, 70, 920, 490)  # left, top, right, bottom of the plotting area
INK, GRID, DOT, MARK = (40, 40, 40), (225, 225, 225), (31, 119, 180), (214, 94, 20)


def plot_ladder(results: Sequence[RungResult], path: Path, *, title: str, recommended: str) -> Path:
    """Writes a PNG: the mean of each rung with two standard errors as a bar, each seed as a small dot."""
    image = Image.new("RGB", SIZE, "white")
    draw = ImageDraw.Draw(image)
    rungs = order_of(results)
    own = {rung: [result for result in results if result.rung == rung] for rung in rungs}
    means = {rung: mean_and_spread([result.scores["acc1"] for result in own[rung]])[0] for rung in rungs}
    errors = {rung: 2.0 * noise(results, rung) for rung in rungs}
    low = max(0.0, min(means[rung] - errors[rung] for rung in rungs) - 1.0)
    high = min(100.0, max(means[rung] + errors[rung] for rung in rungs) + 1.0)
    logs = [math.log10(own[rung][0].trainable) for rung in rungs]
    first, last = logs[0] - 0.5, logs[-1] + 0.5

    def place(trainable: int, accuracy: float) -> tuple[float, float]:
        left, top, right, bottom = FRAME
        across = (math.log10(trainable) - first) / (last - first)
        up = (accuracy - low) / (high - low)
        return left + across * (right - left), bottom - up * (bottom - top)

    _axes(draw, low, high, first, last, title)
    points = [place(own[rung][0].trainable, means[rung]) for rung in rungs]
    draw.line(points, fill=GRID, width=3)
    notes = {rung: f"{means[rung]:.2f} %, {bytes_text(own[rung][0].training_bytes)}" for rung in rungs}
    widths = [max(_width(rung, 17), _width(notes[rung], 14), _width("recommended", 15)) for rung in rungs]
    middles = spread([x for x, _ in points], widths, right=SIZE[0] - 6)
    for rung, (x, y), middle in zip(rungs, points, middles, strict=True):
        colour = MARK if rung == recommended else DOT
        ends = [place(own[rung][0].trainable, means[rung] + sign * errors[rung])[1] for sign in (-1, 1)]
        ends = [min(max(end, FRAME[1]), FRAME[3]) for end in ends]
        draw.line([(x, ends[0]), (x, ends[1])], fill=colour, width=3)
        for end in ends:
            draw.line([(x - 8, end), (x + 8, end)], fill=colour, width=3)
        for result in own[rung] if len(own[rung]) > 1 else []:
            _, at = place(result.trainable, result.scores["acc1"])
            draw.ellipse([x + 14, at - 3, x + 20, at + 3], fill=colour)
        draw.ellipse([x - 7, y - 7, x + 7, y + 7], fill=colour)
        _label(draw, middle, FRAME[3] + 34, rung, colour, size=17)
        _label(draw, middle, FRAME[3] + 58, notes[rung], INK, size=14)
        if rung == recommended:
            _label(draw, middle, FRAME[3] + 82, "recommended", colour, size=15)
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path)
    return path


def _axes(draw: ImageDraw.ImageDraw, low: float, high: float, first: float, last: float, title: str) -> None:
    left, top, right, bottom = FRAME
    for value in _ticks(low, high):
        y = bottom - (value - low) / (high - low) * (bottom - top)
        draw.line([(left, y), (right, y)], fill=GRID)
        draw.text((left - 10, y), f"{value:g}", fill=INK, font=_font(15), anchor="rm")
    for power in range(math.ceil(first), math.floor(last) + 1):
        x = left + (power - first) / (last - first) * (right - left)
        draw.line([(x, top), (x, bottom)], fill=GRID)
        draw.text((x, bottom + 8), f"1e{power}", fill=INK, font=_font(13), anchor="mt")
    draw.rectangle(FRAME, outline=INK)
    draw.text((left, 24), title, fill=INK, font=_font(20), anchor="lm")
    draw.text((left, 50), "top-1 in percent; bars: two standard errors", fill=INK, font=_font(14), anchor="lm")
    draw.text((right, SIZE[1] - 12), "trainable parameters", fill=INK, font=_font(14), anchor="rb")


def _ticks(low: float, high: float) -> list[float]:
    """Four to ten round values between the ends."""
    rough = (high - low) / 5
    base = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * base for factor in (1, 2, 5, 10) if factor * base >= rough)
    start = math.ceil(low / step)
    return [round(number * step, 10) for number in range(start, math.floor(high / step) + 1)]


def spread(middles: Sequence[float], widths: Sequence[float], *, right: float, gap: float = 16.0) -> list[float]:
    """Middles of labels in pixels, rising, moved apart so that none touches the next and all lie left of `right`."""
    apart = [(one + other) / 2 + gap for one, other in itertools.pairwise(widths)]
    found = [max(middle, width / 2 + 6) for middle, width in zip(middles, widths, strict=True)]
    for number, distance in enumerate(apart):
        found[number + 1] = max(found[number + 1], found[number] + distance)
    found[-1] = min(found[-1], right - widths[-1] / 2)
    for number in reversed(range(len(apart))):
        found[number] = min(found[number], found[number + 1] - apart[number])
    return found


def _width(text: str, size: int) -> float:
    return _font(size).getlength(text)


def _label(
    draw: ImageDraw.ImageDraw, x: float, y: float, text: str, colour: tuple[int, int, int], *, size: int
) -> None:
    draw.text((x, y), text, fill=colour, font=_font(size), anchor="mm")


def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)
