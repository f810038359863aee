"""Classification losses as pure functions. Targets are smoothed already (data.mix.soft_targets): none smooths again."""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

LossName = Literal["softmax", "bce", "sigmoid"]


def check_loss(name: LossName, *, smoothing: float, multi_label: bool) -> None:
    """Refuses combinations that cannot be meant.

    Raises:
        ValueError: smoothing with `bce` (its targets are "above 0", so all classes would become positive), or softmax
            on multi-label targets.
    """
    if name == "bce" and smoothing:
        raise ValueError(
            f"task.smoothing={smoothing} with task.loss=bce: its targets are 'above 0', so smoothing would make every "
            "class positive; set task.smoothing=0, or use task.loss=sigmoid"
        )
    if name == "softmax" and multi_label:
        raise ValueError(
            "task.loss=softmax on multi-label targets: classes do not exclude each other; use sigmoid or bce"
        )


def classification_loss(
    name: LossName, logits: Tensor, target: Tensor, *, class_weights: Tensor | None = None
) -> Tensor:
    """Logits [B, K], target int64 [B] or float [B, K] -> scalar.

    `softmax` is cross-entropy; `bce` is DeiT III's (target above 0, mean over batch and classes); `sigmoid` is AugReg's
    and big_vision's (target as it is, summed over classes, mean over the batch).
    """
    if name == "softmax":
        return soft_cross_entropy(logits, target, class_weights=class_weights)
    if name == "bce":
        return binary_cross_entropy(logits, target, binarise=True, over_classes="mean", class_weights=class_weights)
    return binary_cross_entropy(logits, target, binarise=False, over_classes="sum", class_weights=class_weights)


def as_rows(target: Tensor, num_classes: int) -> Tensor:
    """int64 [B] -> one-hot float32 [B, K], zeros for -1; float [B, K] unchanged."""
    if target.is_floating_point():
        return target.float()
    rows = torch.zeros(len(target), num_classes, device=target.device)
    return rows.scatter_(1, target.clamp(min=0)[:, None], 1.0) * (target >= 0)[:, None]


def soft_cross_entropy(logits: Tensor, target: Tensor, *, class_weights: Tensor | None = None) -> Tensor:
    """Cross-entropy with int64 [B] or soft [B, K] targets, in float32, mean over the labelled rows.

    With class weights [K] it is the weighted mean, as torch's for hard labels. Rows of zeros (unlabelled) count
    nowhere; a batch without any label gives 0.
    """
    rows = as_rows(target, logits.shape[1])
    rows = rows if class_weights is None else rows * class_weights
    return -(rows * F.log_softmax(logits.float(), 1)).sum() / rows.sum().clamp(min=torch.finfo(torch.float32).tiny)


def binary_cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    binarise: bool,
    over_classes: Literal["mean", "sum"],
    class_weights: Tensor | None = None,
) -> Tensor:
    """One yes-or-no a class, in float32, mean over the batch. A row of zeros is an image of none of the classes.

    With `binarise` each entry above 0 is a yes: both partners of a mixed image count in full (DeiT III).
    """
    rows = as_rows(target, logits.shape[1])
    rows = (rows > 0).float() if binarise else rows
    losses = F.binary_cross_entropy_with_logits(logits.float(), rows, weight=class_weights, reduction="none")
    return losses.mean() if over_classes == "mean" else losses.sum(1).mean()


def adjust_logits(logits: Tensor, class_counts: Tensor, strength: float = 1.0) -> Tensor:
    """Logit adjustment for training on long tails (Menon et al. 2021): adds strength x log of each class's share.

    Logits [B, K], counts [K] of training images. Evaluation uses the plain logits.

    Raises:
        ValueError: a class without images, whose logit would be minus infinity.
    """
    empty = (class_counts <= 0).nonzero().flatten().tolist()
    if empty:
        raise ValueError(f"logit adjustment: classes {empty[:5]} have no training image; drop them or add images")
    return logits + strength * (class_counts / class_counts.sum()).log().to(logits.device, logits.dtype)


def balanced_weights(class_counts: Tensor, power: float = 1.0) -> Tensor:
    """Class weights [K] proportional to count^-power, scaled so that their mean over the training images is 1.

    Raises:
        ValueError: a class without images.
    """
    empty = (class_counts <= 0).nonzero().flatten().tolist()
    if empty:
        raise ValueError(f"class weights: classes {empty[:5]} have no training image; drop them or add images")
    weights = class_counts.double() ** -power
    return (weights * class_counts.sum() / (weights * class_counts).sum()).float()


def mixed_accuracy(logits: Tensor, target: Tensor, *, smoothing: float = 0.0) -> Tensor:
    """Share of each image that truly shows the predicted class, mean over labelled rows: top-1 that holds under mixing.

    Target int64 [B] or soft [B, K] with this smoothing inside, which is taken out again. Returns a scalar tensor.
    """
    rows, soft = as_rows(target, logits.shape[1]), target.is_floating_point()
    labelled = rows.sum(1) > 0
    share = rows.gather(1, logits.argmax(1, keepdim=True))[:, 0]
    if soft and smoothing:
        share = (share - smoothing / logits.shape[1]) / (1 - smoothing)
    return (share * labelled).sum() / labelled.sum().clamp(min=1)


def distillation_loss(
    logits: Tensor, teacher: Tensor, *, form: Literal["hard", "soft"], temperature: float = 1.0, per: str = "element"
) -> Tensor:
    """Student and teacher logits [B, K] -> scalar; the teacher gets no gradient (Touvron et al. 2021, section 4).

    `hard` is cross-entropy with the teacher's best class. `soft` is temperature^2 x KL(teacher || student) of the tempered
    distributions, summed and divided by B x K (`per` element, DeiT's code) or by B (`per` image, Hinton et al. 2015): K
    times as strong.

    Raises:
        ValueError: other numbers of classes, or an unknown `per`.
    """
    teacher = teacher.detach().float()
    if logits.shape != teacher.shape:
        raise ValueError(
            f"distillation: the student gives {tuple(logits.shape)}, the teacher {tuple(teacher.shape)}; they need the "
            "same classes"
        )
    if per not in ("element", "image"):
        raise ValueError(f"distillation: per={per}: must be element or image")
    if form == "hard":
        return F.cross_entropy(logits.float(), teacher.argmax(1))
    divergence = F.kl_div(
        F.log_softmax(logits.float() / temperature, 1),
        F.log_softmax(teacher / temperature, 1),
        reduction="sum",
        log_target=True,
    )
    return divergence * temperature**2 / (logits.numel() if per == "element" else len(logits))


def feature_loss(features: Tensor, teacher: Tensor) -> Tensor:
    """1 - cosine similarity of features [..., D], mean over all but D, in float32; the teacher gets no gradient."""
    return (1 - F.cosine_similarity(features.float(), teacher.detach().float(), dim=-1)).mean()
