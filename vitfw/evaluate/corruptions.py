"""CIFAR-C on the fly: corruptions of 32 x 32 pictures with the published strengths.

Source: Hendrycks and Dietterich 2019; strengths are those of the authors' generator for CIFAR. Written anew on numpy,
torch and Pillow, so single pixels differ from the published files; a result must say "generated". Frost lays
photographs of ice over the picture: give a folder of them, or leave it out, which a result must say as well.
Pictures are float [H, W, 3] from 0 to 1 inside.
"""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

SIDE = 32  # pixels for which the strengths are meant
SEVERITIES = (1, 2, 3, 4, 5)
Random = np.random.Generator

# name -> strength at severities 1 to 5
STRENGTHS: dict[str, tuple[Any, ...]] = {
    "gaussian_noise": (0.04, 0.06, 0.08, 0.09, 0.10),
    "shot_noise": (500, 250, 100, 75, 50),
    "impulse_noise": (0.01, 0.02, 0.03, 0.05, 0.07),
    "defocus_blur": ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1)),  # radius, smoothing of its edge
    "glass_blur": ((0.05, 1, 1), (0.25, 1, 1), (0.4, 1, 1), (0.25, 1, 2), (0.4, 1, 2)),  # sigma, reach, rounds
    "motion_blur": ((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5)),  # radius, sigma
    "zoom_blur": (1.06, 1.11, 1.16, 1.21, 1.26),  # largest factor
    "snow": (
        (0.1, 0.2, 1, 0.6, 8, 3, 0.95),  # mean, deviation, zoom, threshold, radius, sigma, share of the picture
        (0.1, 0.2, 1, 0.5, 10, 4, 0.9),
        (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
        (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
        (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
    ),
    "frost": ((1, 0.2), (1, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45)),  # shares of picture and ice
    "fog": ((0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75)),  # strength, decay of the roughness
    "brightness": (0.05, 0.1, 0.15, 0.2, 0.3),
    "contrast": (0.75, 0.5, 0.4, 0.3, 0.15),
    "elastic_transform": ((0, 0, 2.56), (1.6, 6.4, 2.24), (2.56, 1.92, 1.92), (3.2, 1.28, 1.6), (3.2, 0.96, 0.96)),
    "pixelate": (0.95, 0.9, 0.85, 0.75, 0.65),
    "jpeg_compression": (80, 65, 58, 50, 40),
}


class Corrupted:
    """A transform in front of another: PIL image -> corrupted PIL image -> `then`. Draws from numpy's global generator,
    which the data set seeds for each image, so the corruption of an image is always the same."""

    def __init__(self, name: str, severity: int, then: Callable[[Any], Any], *, frost: str | None = None) -> None:
        check(name, severity, frost)
        self.name, self.severity, self.then, self.frost = name, severity, then, frost

    def __call__(self, image: Image.Image) -> Any:
        random = np.random.default_rng(np.random.randint(0, 2**31))
        return self.then(corrupt(image, self.name, self.severity, random, frost=self.frost))


def check(name: str, severity: int, frost: str | None) -> None:
    """Raises ValueError for an unknown corruption or severity, and for frost without its photographs."""
    if name not in STRENGTHS:
        raise ValueError(f"corruption {name!r} is unknown; there are {', '.join(STRENGTHS)}")
    if severity not in SEVERITIES:
        raise ValueError(f"severity {severity} of {name}: must be 1 to 5")
    if name == "frost" and (frost is None or not _photographs(frost)):
        raise ValueError(f"corruption frost needs a folder of photographs of ice (frost={frost}); or leave frost out")


def corrupt(image: Image.Image, name: str, severity: int, random: Random, *, frost: str | None = None) -> Image.Image:
    """A 32 x 32 picture -> the same corrupted. Grey pictures come back grey. Raises ValueError for other sizes."""
    check(name, severity, frost)
    if image.size != (SIDE, SIDE):
        raise ValueError(f"a picture is {image.size[0]} x {image.size[1]} pixels; the strengths are for 32 x 32")
    strength, mode = STRENGTHS[name][severity - 1], image.mode
    if name in ("pixelate", "jpeg_compression"):
        return (_pixelate if name == "pixelate" else _jpeg)(image.convert("RGB"), strength).convert(mode)
    x = np.asarray(image.convert("RGB"), np.float64) / 255.0
    if name == "frost":
        assert frost is not None
        result = _frost(x, strength, random, frost)
    else:
        result = OPERATIONS[name](x, strength, random)
    return Image.fromarray(np.uint8(np.clip(result, 0.0, 1.0) * 255.0)).convert(mode)


def _gaussian_noise(x: np.ndarray, strength: Any, random: Random) -> np.ndarray:
    return x + random.normal(scale=strength, size=x.shape)


def _shot_noise(x: np.ndarray, strength: Any, random: Random) -> np.ndarray:
    return random.poisson(x * strength) / strength


def _impulse_noise(x: np.ndarray, strength: Any, random: Random) -> np.ndarray:
    """Salt and pepper: this share of the values becomes 0 or 1."""
    hit, salt = random.random(x.shape) < strength, random.random(x.shape) < 0.5
    return np.where(hit, salt.astype(np.float64), x)


def _defocus_blur(x: np.ndarray, strength: Any, random: Random) -> np.ndarray:
    radius, smooth = strength
    rows, columns = np.mgrid[-8:9, -8:9]
    disk = (rows**2 + columns**2 <= radius**2).astype(np.float64)
    taps = np.exp(-0.5 * (np.arange(-1, 2) / smooth) ** 2)
    edge = np.outer(taps, taps) / taps.sum() ** 2
    kernel = _filter(disk[:, :, None] / disk.sum(), edge, "constant")[:, :, 0]
    return _filter(x, kernel, "reflect")


def _glass_blur(x: np.ndarray, strength: Any, random: Random) -> np.ndarray:
    """Each pixel takes the value of a random neighbour above or to the left, between two blurs."""
    sigma, reach, rounds = strength
    x = np.floor(gaussian_blur(x, sigma) * 255.0) / 255.0
    for _ in range(rounds):
        shifts = random.integers(-reach, reach, (SIDE, SIDE, 2))
        for row in range(SIDE - reach, reach, -1):
            for column in range(SIDE - reach, reach, -1):
                down, right = shifts[row, column]
                x[row, column] = x[row + down, column + right]
    return gaussian_blur(x, sigma)


def _motion_blur(x: np.ndarray, strength: Any, random: Random) -> np.ndarray:
    radius, sigma = strength
    return _streak(x, radius, sigma, random.uniform(-45, 45))


def _zoom_blur(x: np.ndarray, strength: Any, random: Random) -> np.ndarray:
    factors = np.arange(1.0, strength - 1e-9, 0.01)
    return (x + sum(zoom(x, float(factor)) for factor in factors)) / (len(factors) + 1)


def _snow(x: np.ndarray, strength: Any, random: Random) -> np.ndarray:
    mean, deviation, factor, threshold, radius, sigma, share = strength
    flakes = zoom(random.normal(mean, deviation, (SIDE, SIDE, 1)), factor)
    flakes = np.clip(np.where(flakes < threshold, 0.0, flakes), 0.0, 1.0)
    flakes = _streak(flakes, radius, sigma, random.uniform(-135, -45))
    grey = (x @ np.array([0.299, 0.587, 0.114]))[:, :, None]
    white = share * x + (1 - share) * np.maximum(x, grey * 1.5 + 0.5)
    return white + flakes + flakes[::-1, ::-1]


def _frost(x: np.ndarray, strength: Any, random: Random, folder: str) -> np.ndarray:
    paths = _photographs(folder)
    ice = Image.open(paths[int(random.integers(len(paths)))]).convert("RGB")
    ice = ice.resize((max(SIDE, round(ice.width * 0.2)), max(SIDE, round(ice.height * 0.2))), Image.Resampling.BILINEAR)
    left, top = int(random.integers(0, ice.width - SIDE + 1)), int(random.integers(0, ice.height - SIDE + 1))
    part = np.asarray(ice.crop((left, top, left + SIDE, top + SIDE)), np.float64) / 255.0
    return strength[0] * x + strength[1] * part


def _fog(x: np.ndarray, strength: Any, random: Random) -> np.ndarray:
    thickness, decay = strength
    top = x.max()
    return (x + thickness * plasma(decay, random)[:, :, None]) * top / (top + thickness)


def _brightness(x: np.ndarray, strength: Any, random: Random) -> np.ndarray:
    """Raises the value of hue-saturation-value, in which a colour is proportional to its value; black turns grey."""
    value = x.max(axis=2, keepdims=True)
    raised = np.clip(value + strength, 0.0, 1.0)
    return np.where(value > 0, x / np.where(value > 0, value, 1.0) * raised, raised)


def _contrast(x: np.ndarray, strength: Any, random: Random) -> np.ndarray:
    mean = x.mean(axis=(0, 1), keepdims=True)
    return (x - mean) * strength + mean


def _elastic_transform(x: np.ndarray, strength: Any, random: Random) -> np.ndarray:
    """A random affine map of three points, then smooth random shifts."""
    amount, sigma, jitter = strength
    centre, reach = SIDE // 2, SIDE // 3
    points = np.array([[1, 1], [1, -1], [-1, -1]], np.float64) * reach + centre  # (x, y)
    moved = points + random.uniform(-jitter, jitter, points.shape)
    backwards = np.linalg.solve(np.c_[moved, np.ones(3)], points)  # [3, 2]: where a target point comes from
    columns, rows = np.meshgrid(np.arange(SIDE, dtype=np.float64), np.arange(SIDE, dtype=np.float64))
    source = np.stack([columns, rows, np.ones_like(rows)], axis=2) @ backwards
    x = _sample(x, source[:, :, 1], source[:, :, 0])
    if amount:
        shifts = [gaussian_blur(random.uniform(-1, 1, (SIDE, SIDE, 1)), sigma, reach=3.0)[:, :, 0] for _ in range(2)]
        x = _sample(x, rows + amount * shifts[1], columns + amount * shifts[0])
    return x


def _pixelate(image: Image.Image, strength: float) -> Image.Image:
    small = int(SIDE * strength)
    return image.resize((small, small), Image.Resampling.BOX).resize((SIDE, SIDE), Image.Resampling.BOX)


def _jpeg(image: Image.Image, strength: int) -> Image.Image:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=strength)
    return Image.open(io.BytesIO(file.getvalue())).convert("RGB")


OPERATIONS: dict[str, Callable[[np.ndarray, Any, Random], np.ndarray]] = {
    "gaussian_noise": _gaussian_noise,
    "shot_noise": _shot_noise,
    "impulse_noise": _impulse_noise,
    "defocus_blur": _defocus_blur,
    "glass_blur": _glass_blur,
    "motion_blur": _motion_blur,
    "zoom_blur": _zoom_blur,
    "snow": _snow,
    "fog": _fog,
    "brightness": _brightness,
    "contrast": _contrast,
    "elastic_transform": _elastic_transform,
}


def gaussian_blur(x: np.ndarray, sigma: float, *, reach: float = 4.0) -> np.ndarray:
    """x [H, W, C]; the kernel ends at `reach` sigma, the picture's edge goes on outside."""
    radius = int(reach * sigma + 0.5)
    taps = np.exp(-0.5 * (np.arange(-radius, radius + 1) / sigma) ** 2)
    return _filter(x, np.outer(taps, taps) / taps.sum() ** 2, "edge" if reach == 4.0 else "symmetric")


def zoom(x: np.ndarray, factor: float) -> np.ndarray:
    """x [H, H, C] -> its middle enlarged by `factor`, bilinear with corners on corners, at the same size."""
    side = len(x)
    kept = int(np.ceil(side / factor))
    first = (side - kept) // 2
    part = torch.from_numpy(np.ascontiguousarray(x[first : first + kept, first : first + kept])).permute(2, 0, 1)[None]
    large = round(kept * factor)
    grown = F.interpolate(part, size=(large, large), mode="bilinear", align_corners=True)[0].permute(1, 2, 0).numpy()
    trim = (large - side) // 2
    return grown[trim : trim + side, trim : trim + side]


def plasma(decay: float, random: Random) -> np.ndarray:
    """[32, 32] from 0 to 1: the diamond-square fractal on a torus; the roughness falls by `decay` each halving."""
    field, step, rough = np.zeros((SIDE, SIDE)), SIDE, 100.0

    def noisy(total: np.ndarray) -> np.ndarray:
        return total / 4 + rough * random.uniform(-rough, rough, total.shape)

    while step >= 2:
        half = step // 2
        corners = field[::step, ::step]
        across = corners + np.roll(corners, -1, axis=0)
        field[half::step, half::step] = noisy(across + np.roll(across, -1, axis=1))
        middles = field[half::step, half::step]
        field[::step, half::step] = noisy(
            middles + np.roll(middles, 1, axis=0) + corners + np.roll(corners, -1, axis=1)
        )
        field[half::step, ::step] = noisy(
            middles + np.roll(middles, 1, axis=1) + corners + np.roll(corners, -1, axis=0)
        )
        step, rough = half, rough / decay
    field -= field.min()
    return field / field.max()


def _streak(x: np.ndarray, radius: int, sigma: float, angle: float) -> np.ndarray:
    """Blur along a line in one direction, `angle` in degrees: half a Gaussian of 2 radius + 1 taps, whole pixels."""
    taps = np.exp(-0.5 * (np.arange(2 * radius + 1) / sigma) ** 2)
    turn, result = np.deg2rad(angle), np.zeros_like(x)
    rows, columns = np.mgrid[: len(x), : len(x)]
    for place, tap in enumerate(taps / taps.sum()):
        down, right = (int(np.ceil(place * part - 0.5)) for part in (np.sin(turn), np.cos(turn)))
        result += tap * x[np.clip(rows + down, 0, len(x) - 1), np.clip(columns + right, 0, len(x) - 1)]
    return result


def _filter(x: np.ndarray, kernel: np.ndarray, border: str) -> np.ndarray:
    """x [H, W, C], kernel [k, k] -> correlation, with numpy's kind of border."""
    pad = len(kernel) // 2
    wide = np.pad(x, ((pad, pad), (pad, pad), (0, 0)), mode=border)  # type: ignore[call-overload]
    planes = torch.from_numpy(wide).permute(2, 0, 1)[:, None]
    return F.conv2d(planes, torch.from_numpy(kernel)[None, None])[:, 0].permute(1, 2, 0).numpy()


def _sample(x: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """x [H, W, C] at real places [H, W], bilinear; outside, the picture is mirrored at its edge pixels."""
    side = len(x)

    def mirrored(place: np.ndarray) -> np.ndarray:
        place = np.abs(place) % (2 * side - 2)
        return np.where(place >= side, 2 * side - 2 - place, place)

    top, left = np.floor(rows).astype(int), np.floor(columns).astype(int)
    down, right = (rows - top)[:, :, None], (columns - left)[:, :, None]
    above = x[mirrored(top), mirrored(left)] * (1 - right) + x[mirrored(top), mirrored(left + 1)] * right
    below = x[mirrored(top + 1), mirrored(left)] * (1 - right) + x[mirrored(top + 1), mirrored(left + 1)] * right
    return above * (1 - down) + below * down


def _photographs(folder: str) -> list[Path]:
    return sorted(path for path in Path(folder).glob("*") if path.suffix.lower() in (".png", ".jpg", ".jpeg"))
