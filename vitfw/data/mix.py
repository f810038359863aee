"""What happens to a batch on the device: normalise, erase, mixup and CutMix, soft targets. No synchronisation."""

import math

import torch
from torch import Tensor, nn

from vitfw.data.augment import AugmentConfig, statistics

Batch = dict[str, Tensor]


class BatchAugment(nn.Module):
    """uint8 batch -> float batch, in evaluation normalised only. Draws from the global generator of the batch's device.

    A mixed or smoothed label is a row of targets [B, K] that sums to 1 (0 for an unlabelled image). Smoothing is folded
    in here, once, and a loss must not smooth again.
    """

    scale: Tensor
    shift: Tensor
    normalisation: Tensor

    def __init__(
        self, config: AugmentConfig, *, channels: int = 3, num_classes: int | None = None, smoothing: float = 0.0
    ) -> None:
        """`num_classes` None: labels pass through untouched, and mixing is refused."""
        super().__init__()
        if not 0 <= smoothing < 1:
            raise ValueError(f"task.smoothing={smoothing}: must lie in [0, 1)")
        self.mixes = config.mix_probability > 0 and (config.mixup > 0 or config.cutmix > 0)
        if num_classes is None and (self.mixes or smoothing):
            raise ValueError(
                f"augment.mixup={config.mixup}, augment.cutmix={config.cutmix}, smoothing={smoothing}: this task has "
                "no class labels to mix; set all three to 0"
            )
        self.config, self.num_classes, self.smoothing = config, num_classes, smoothing
        normalisation = torch.tensor(statistics(config, channels))
        mean, std = normalisation[:, :, None, None]
        self.register_buffer("normalisation", normalisation, persistent=False)
        self.register_buffer("scale", 1 / (255 * std), persistent=False)
        self.register_buffer("shift", -mean / std, persistent=False)

    def forward(self, batch: Batch, *, training: bool) -> Batch:
        """`image` uint8 [B, C, H, W] -> float32; `label` int64 [B] or float [B, K] -> the same or soft [B, K].

        In training the batch also says how its images are normalised, for networks that want it otherwise:
        `normalisation` float32 [2, C], mean and deviation.
        """
        image = batch["image"]
        if image.dtype != torch.uint8:
            raise ValueError(f"batch image: dtype {image.dtype}; the loader hands over uint8")
        image = image.float().mul_(self.scale.to(image.device)).add_(self.shift.to(image.device))
        if not training:
            return batch | {"image": image}
        batch = batch | {"normalisation": self.normalisation.to(image.device)}
        if self.config.erasing:
            image = erase(image, self.config.erasing, self.config.erasing_mode)
        label = batch.get("label")
        if label is not None and self.num_classes is not None and (self.mixes or self.smoothing):
            label = soft_targets(label, self.num_classes, self.smoothing)
        if self.mixes:
            if label is None:
                raise ValueError("batch has no label, but augment.mixup or augment.cutmix is on; set both to 0")
            own, share = draw_weights(self.config, image.shape[2], image.shape[3], image.device)
            image = mix_images(image, own, self.config.pairing)
            label = torch.lerp(partner(label, self.config.pairing), label, share)
        return batch | {"image": image} | ({} if label is None else {"label": label})


def soft_targets(label: Tensor, num_classes: int, smoothing: float) -> Tensor:
    """int64 [B] -> float32 [B, K]: 1 - s + s / K for the class, s / K elsewhere; a label of -1 gives a row of zeros.

    Multi-label rows, float [B, K] already, are drawn towards 1/2 by s: each entry is a yes or no of its own.
    """
    if label.is_floating_point():
        return label.float() * (1 - smoothing) + 0.5 * smoothing
    target = torch.full((len(label), num_classes), smoothing / num_classes, device=label.device)
    target.scatter_(1, label.clamp(min=0)[:, None], 1 - smoothing + smoothing / num_classes)
    return target * (label >= 0)[:, None]


def partner(value: Tensor, pairing: str) -> Tensor:
    """[B, ...] -> the partner of each row. The middle row of an odd batch is its own partner."""
    return value.flip(0) if pairing == "reverse" else value.roll(1, 0)


def mix_images(images: Tensor, own: Tensor, pairing: str) -> Tensor:
    """Float images [B, C, H, W], share of the image itself [H, W] or scalar -> mixed with their partners.

    On the CPU it works in place, pair by pair, since a second copy of the batch costs more there than the arithmetic.
    """
    if images.device.type != "cpu":
        return torch.lerp(partner(images, pairing), images, own)
    share = own.min().item()
    if share == own.max().item():
        region = images
    else:  # CutMix: ones, but for zeros in a box
        rows, columns = ((own == 0).any(dim).nonzero() for dim in (1, 0))
        region = images[:, :, int(rows[0]) : int(rows[-1]) + 1, int(columns[0]) : int(columns[-1]) + 1]
    if share == 1:
        return images
    if pairing == "reverse":
        for number in range(len(region) // 2):
            first, second = region[number], region[-1 - number]
            before = first.clone()
            first.lerp_(second, 1 - share)
            second.lerp_(before, 1 - share)
        return images
    last = region[-1].clone()
    for number in range(len(region) - 1, 0, -1):
        region[number].lerp_(region[number - 1], 1 - share)
    region[0].lerp_(last, 1 - share)
    return images


def _beta(alpha: float, device: torch.device) -> Tensor:
    """One draw of Beta(alpha, alpha) as a ratio of two Gamma draws, in float64 since a small alpha gives tiny ones."""
    concentration = torch.full((2,), alpha, dtype=torch.float64, device=device)
    draws = torch.distributions.Gamma(concentration, torch.ones_like(concentration), validate_args=False).sample()
    return draws[0] / draws.sum()


def cutmix_box(own: Tensor, row: Tensor, column: Tensor, height: int, width: int) -> tuple[Tensor, ...]:
    """(top, bottom, left, right) of the box that takes 1 - own of the area around (row, column), cut to the image."""
    side = (1 - own).sqrt()
    rows, columns = (height * side).long(), (width * side).long()
    top, bottom = row - rows // 2, row + (rows + 1) // 2
    left, right = column - columns // 2, column + (columns + 1) // 2
    return top.clamp(0, height), bottom.clamp(0, height), left.clamp(0, width), right.clamp(0, width)


def draw_weights(config: AugmentConfig, height: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """One draw for a batch: the share of the image itself at each pixel, [H, W] or scalar, and over the image, scalar.

    The law of timm's Mixup in batch mode: one of mixup and CutMix; CutMix's share is recomputed from the cut box.
    """
    one = torch.ones((), dtype=torch.float64, device=device)
    own = share = one
    if config.mixup > 0:
        own = _beta(config.mixup, device)
        own = share = torch.maximum(own, 1 - own) if config.fold else own
    if config.cutmix > 0:
        row, column = ((torch.rand((), device=device, dtype=torch.float64) * limit).long() for limit in (height, width))
        top, bottom, left, right = cutmix_box(_beta(config.cutmix, device), row, column, height, width)
        rows, columns = torch.arange(height, device=device)[:, None], torch.arange(width, device=device)
        inside = (rows >= top) & (rows < bottom) & (columns >= left) & (columns < right)
        cut_share = 1 - (bottom - top) * (right - left) / (height * width)
        switch = config.switch if config.mixup > 0 else 1.0
        cut = torch.rand((), device=device) < switch
        own, share = torch.where(cut, (~inside).double(), own), torch.where(cut, cut_share, share)
    mixed = torch.rand((), device=device) < config.mix_probability
    return torch.where(mixed, own, one).float(), torch.where(mixed, share, one).float()


_AREA, _ASPECT, _TRIES = (0.02, 1 / 3), (0.3, 1 / 0.3), 10


def draw_boxes(count: int, height: int, width: int, probability: float, device: torch.device) -> Tensor:
    """Rectangles to erase, int64 [count, 4] (top, bottom, left, right), empty where nothing is erased.

    Zhong et al.'s law as in timm: area 2 % to a third, log-uniform aspect 0.3 to 1/0.3, first of ten tries that fits.
    """
    draw = torch.rand((4, count, _TRIES), device=device, dtype=torch.float64)
    area = (_AREA[0] + (_AREA[1] - _AREA[0]) * draw[0]) * height * width
    low, high = math.log(_ASPECT[0]), math.log(_ASPECT[1])
    aspect = (low + (high - low) * draw[1]).exp()
    rows, columns = (area * aspect).sqrt().round().long(), (area / aspect).sqrt().round().long()
    fits = (rows < height) & (columns < width)
    first = fits.long().argmax(1, keepdim=True)
    rows, columns = rows.gather(1, first)[:, 0], columns.gather(1, first)[:, 0]
    chosen = fits.any(1) & (torch.rand(count, device=device) < probability)
    top = (draw[2].gather(1, first)[:, 0] * (height - rows + 1)).long()
    left = (draw[3].gather(1, first)[:, 0] * (width - columns + 1)).long()
    return torch.stack([top, top + rows, left, left + columns], 1) * chosen[:, None]


def erase(images: Tensor, probability: float, mode: str) -> Tensor:
    """Erases a rectangle of some of the normalised images [B, C, H, W], in place, with noise or with zeros."""
    count, _, height, width = images.shape
    boxes = draw_boxes(count, height, width, probability, images.device)
    if (
        images.device.type == "cpu"
    ):  # noise only where it is used: drawing it for all pixels costs as much as normalising
        for image, (top, bottom, left, right) in zip(images, boxes.tolist(), strict=True):
            region = image[:, top:bottom, left:right]
            region.copy_(torch.randn(region.shape)) if mode == "pixel" else region.zero_()
        return images
    top, bottom, left, right = (edge[:, None, None, None] for edge in boxes.unbind(1))
    rows = torch.arange(height, device=images.device)[:, None]
    columns = torch.arange(width, device=images.device)
    inside = (rows >= top) & (rows < bottom) & (columns >= left) & (columns < right)
    fill = torch.randn_like(images) if mode == "pixel" else torch.zeros((), device=images.device)
    return torch.where(inside, fill, images)
