"""Masked autoencoding (He et al. 2021): the encoder sees a quarter of the patches, a small decoder predicts the others.

Shapes: B images, N patches, K visible and M removed, D features of the encoder, P values of a patch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import Metric, SumMetric

from vitfw.models.build import build_model
from vitfw.models.decoder import Decoder, decoder_architecture
from vitfw.models.load_report import LoadConfig, LoadReport
from vitfw.models.mae_weights import load_autoencoder
from vitfw.models.masks import MaskKind, grid_side, kept_patches, numbers_needed, patch_order, split_order
from vitfw.models.neighbours import NeighbourAccuracy
from vitfw.models.patches import normalise_patches, take_patches
from vitfw.models.probe_head import ProbeHead
from vitfw.models.variants import ModelConfig
from vitfw.models.vit import ViT, parameter_layers
from vitfw.seeding import derive
from vitfw.tasks.task import Batch, Monitor, Task, TaskConfig


@dataclass(frozen=True, kw_only=True)
class MaeConfig(TaskConfig):
    """Section `task` for name=mae."""

    name: str = field(default="mae", metadata={"help": "which task trains"})
    mask_ratio: float = field(default=0.75, metadata={"help": "share of the patches removed; int(N (1 - ratio)) stay"})
    mask: MaskKind = field(default="random", metadata={"help": "random, block (rectangles) or grid (a lattice stays)"})
    normalise_target: bool = field(
        default=True, metadata={"help": "predict each patch with its own mean and deviation taken out"}
    )
    decoder_width: int = field(default=512, metadata={"help": "features of a decoder token"})
    decoder_depth: int = field(default=8, metadata={"help": "decoder blocks"})
    decoder_heads: int = field(default=16, metadata={"help": "attention heads of the decoder"})
    decoder_mlp_ratio: float = field(default=4.0, metadata={"help": "hidden features of its MLP / decoder_width"})
    probe: bool = field(
        default=True,
        metadata={"help": "where images have a label: train a linear head on detached features, to watch quality"},
    )
    probe_pool: Literal["cls", "mean"] = field(
        default="cls", metadata={"help": "what probe and neighbours read: the class token or the mean of the patches"}
    )
    neighbours: int = field(
        default=20, metadata={"help": "k of the nearest-neighbour accuracy within the validation set; 0: none"}
    )
    neighbour_temperature: float = field(
        default=0.07, metadata={"help": "a neighbour votes with exp(cosine similarity / temperature)"}
    )
    tune_per_class: int = field(
        default=0,
        metadata={
            "help": "labelled training images a class for a short fine-tune of a copy at each evaluation; 0: none"
        },
    )
    tune_steps: int = field(default=100, metadata={"help": "updates of that fine-tune"})
    tune_batch: int = field(default=64, metadata={"help": "images of one of its updates, over all processes"})
    tune_lr: float = field(default=1e-3, metadata={"help": "its peak learning rate, at the head; layer decay is 0.75"})

    def __post_init__(self) -> None:
        if not 0 < self.mask_ratio < 1:
            raise ValueError(f"task.mask_ratio={self.mask_ratio}: must lie between 0 and 1")
        if self.mask == "grid":
            grid_side(self.mask_ratio)
        positive = ("decoder_width", "decoder_depth", "decoder_heads", "decoder_mlp_ratio", "neighbour_temperature")
        for key in (*positive, "tune_steps", "tune_batch", "tune_lr"):
            if not getattr(self, key) > 0:
                raise ValueError(f"task.{key}={getattr(self, key)}: must be above 0")
        if self.decoder_width % 4 or self.decoder_width % self.decoder_heads:
            raise ValueError(
                f"task.decoder_width={self.decoder_width}: must be divisible by 4 (sin-cos positions) and by "
                f"task.decoder_heads={self.decoder_heads}"
            )
        for key in ("neighbours", "tune_per_class"):
            if getattr(self, key) < 0:
                raise ValueError(f"task.{key}={getattr(self, key)}: must be 0 (none) or more")


class MaeTask(Task):
    """Owns encoder, decoder and, where there are labels, a probe that never sends a gradient into the encoder."""

    monitor = Monitor("loss", "min")

    def __init__(self, encoder: ViT, decoder: Decoder, config: MaeConfig, *, num_classes: int = 0) -> None:
        """`num_classes`: classes of the labels that the probe learns; 0: no probe, no neighbours."""
        super().__init__()
        self.encoder, self.decoder, self.config = encoder, decoder, config
        self.label_classes = num_classes  # Task.num_classes stays None: labels must come unmixed
        self.probe = ProbeHead(encoder.embed_dim, num_classes) if config.probe and num_classes else None

    def losses(self, batch: Batch, progress: float) -> dict[str, Tensor]:
        """Batch -> `loss`, mean squared error on the removed patches; the probe's own loss and accuracy (percent)."""
        images = batch["image"]
        count = numbers_needed(self.config.mask, self.grid(images))
        numbers = torch.rand(len(images), count, device=images.device)
        loss, tokens = self.reconstruct(images, numbers)
        if self.probe is None:
            return {"loss": loss.mean()}
        label = self._single_label(batch)
        logits = self.probe(self._pool(tokens.detach()))
        labelled = (label >= 0).sum().clamp(min=1)  # a batch without labels has loss 0, and a gradient of zeros
        probe_loss = F.cross_entropy(logits, label, ignore_index=-1, reduction="sum") / labelled
        hits = (logits.detach().argmax(dim=1) == label).sum() / labelled
        # the probe's loss adds its gradient, but nothing to the value: `loss` is MAE's, with labels or without
        total = loss.mean() + (probe_loss - probe_loss.detach())
        return {"loss": total, "probe_loss": probe_loss, "probe_acc1": 100.0 * hits}

    def reconstruct(self, images: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Images [B, C, H, W], uniform numbers of the masks -> loss of each image [B], encoder's tokens [B, T, D]."""
        visible, removed = self.masks(images, numbers)
        tokens = self.encoder(images, keep=visible, output="tokens")
        prediction = self.decoder(tokens, visible, removed, grid=self.grid(images))
        error = prediction.float() - self.targets(images, removed)
        return error.square().flatten(1).mean(1), tokens

    def masks(self, images: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Uniform numbers [B, `numbers_needed`] -> patch numbers: visible int64 [B, K], removed int64 [B, M]."""
        grid = self.grid(images)
        order = patch_order(self.config.mask, numbers, grid, self.config.mask_ratio)
        return split_order(order, kept_patches(grid[0] * grid[1], self.config.mask_ratio))

    def fixed_masks(self, images: Tensor, index: Tensor) -> Tensor:
        """Numbers for the masks of evaluation: a function of each sample's row in the data set alone."""
        count, generator = numbers_needed(self.config.mask, self.grid(images)), torch.Generator()
        rows = [torch.rand(count, generator=generator.manual_seed(derive(0, "mae mask", i))) for i in index.tolist()]
        return torch.stack(rows).to(images.device)

    def targets(self, images: Tensor, removed: Tensor) -> Tensor:
        """What the decoder should say about the removed patches: float32 [B, M, P]."""
        patches = take_patches(images, self.encoder.patch_size, removed)
        return normalise_patches(patches) if self.config.normalise_target else patches.float()

    def grid(self, images: Tensor) -> tuple[int, int]:
        """Patches down and across."""
        return images.shape[2] // self.encoder.patch_size[0], images.shape[3] // self.encoder.patch_size[1]

    def after_step(self, progress: float) -> None:
        if self.probe is not None:
            self.probe.average_statistics()

    def measures(self) -> dict[str, Metric]:
        # sums in float64, so that the result is the same for any split; MeanMetric drops its weights where NaN may pass
        sums = ["loss", "samples", *(["hits", "labelled"] if self.probe is not None else [])]
        found: dict[str, Metric] = {name: SumMetric(nan_strategy="disable").set_dtype(torch.float64) for name in sums}
        if self.label_classes and self.config.neighbours:
            k, temperature = self.config.neighbours, self.config.neighbour_temperature
            found["neighbours"] = NeighbourAccuracy(self.label_classes, k=k, temperature=temperature)
        return found

    def measure(self, batch: Batch, measures: Mapping[str, Metric]) -> None:
        """The loss under fixed masks; probe and neighbours read the whole image, as all later use of the encoder."""
        images, index = batch["image"], batch["index"]
        loss, _ = self.reconstruct(images, self.fixed_masks(images, index))
        counted = index >= 0
        measures["loss"].update(torch.where(counted, loss.double(), 0.0).sum())
        measures["samples"].update(counted.sum().double())
        if "hits" not in measures and "neighbours" not in measures:
            return
        label = torch.where(counted, self._single_label(batch), -1)
        features = self._pool(self.encoder(images, output="tokens"))
        if self.probe is not None:
            measures["hits"].update((self.probe(features).argmax(dim=1) == label).sum().double())
            measures["labelled"].update((label >= 0).sum().double())
        if "neighbours" in measures:
            measures["neighbours"].update(features, label)

    def results(self, measures: Mapping[str, Metric]) -> dict[str, float]:
        """loss; probe_acc1 and the neighbours' accuracy in percent, where the validation set has labels."""
        # in the order of `measures`, the same on all ranks: each compute() is a collective
        sums = {name: metric.compute().item() for name, metric in measures.items() if name != "neighbours"}
        values = {"loss": sums["loss"] / max(sums["samples"], 1.0)}
        if sums.get("labelled"):
            values["probe_acc1"] = 100.0 * sums["hits"] / sums["labelled"]
        if "neighbours" in measures:
            accuracy = measures["neighbours"].compute().item()
            if accuracy == accuracy:  # NaN: no labelled image in the validation set
                values[f"knn_k{self.config.neighbours}_t{self.config.neighbour_temperature:g}_acc1"] = 100.0 * accuracy
        return values | {"samples": sums["samples"]}

    @property
    def network(self) -> nn.Module:
        return self.encoder

    def load_weights(self, place: str, config: LoadConfig) -> LoadReport:
        """Encoder, and decoder where the file has one: going on with pretraining. The probe always starts anew."""
        normalised = self.config.normalise_target
        return load_autoencoder(self.encoder, self.decoder, place, config, normalise_target=normalised)

    def parameter_layers(self, norm_layer: Literal["last_block", "head"]) -> dict[str, int]:
        place: Literal["block", "head"] = "head" if norm_layer == "head" else "block"
        layers = {f"encoder.{name}": at for name, at in parameter_layers(self.encoder, final_norm=place).items()}
        after = {name: self.encoder.depth + 1 for name, _ in self.named_parameters() if not name.startswith("encoder.")}
        return layers | after

    def cost_text(self) -> str:
        """One line for the start-up summary; the decoder decides whether a step is cheaper than a supervised one."""
        arch, config = self.encoder.arch, self.config
        encoder, decoder = self.macs()
        kept = kept_patches(arch.patches, config.mask_ratio)
        text = (
            f"encoder {encoder / 1e9:.3g} GMAC on {kept} of {arch.patches} patches, decoder {decoder / 1e9:.3g} GMAC: "
            f"decoder / encoder = {decoder / encoder:.2f}"
        )
        if not config.tune_per_class:
            return text
        images = config.tune_steps * config.tune_batch * self._encoder_macs(arch.patches) / (encoder + decoder)
        return text + (
            f"; the short fine-tune at each evaluation, {config.tune_steps} updates of {config.tune_batch} whole images, "
            f"costs as much as pretraining on {images:,.0f} images"
        )

    def macs(self) -> tuple[int, int]:
        """Multiply-adds of one image in encoder and decoder, counted as published: every block on all its tokens."""
        arch, width = self.encoder.arch, self.decoder.arch.width
        visible = arch.prefix + kept_patches(arch.patches, self.config.mask_ratio)
        tokens = arch.prefix + arch.patches
        decoder = _block_macs(self.decoder.blocks, tokens, width)
        decoder += visible * self.decoder.embed.weight.numel() + tokens * self.decoder.pred.weight.numel()
        return self._encoder_macs(visible - arch.prefix), decoder

    def _encoder_macs(self, patches: int) -> int:
        """Of one image of which this many patches go through the blocks."""
        arch = self.encoder.arch
        embedding = arch.patches * self.encoder.patch_embed.proj.weight.numel()
        return embedding + _block_macs(self.encoder.blocks, arch.prefix + patches, arch.width)

    def _pool(self, tokens: Tensor) -> Tensor:
        """Tokens [B, prefix + n, D] -> features [B, D]."""
        return tokens[:, 0] if self.config.probe_pool == "cls" else tokens[:, self.encoder.num_prefix_tokens :].mean(1)

    def _single_label(self, batch: Batch) -> Tensor:
        label = batch["label"]
        if label.ndim != 1 or label.is_floating_point():
            raise ValueError(
                f"task.probe={self.config.probe}, task.neighbours={self.config.neighbours}: both need one label an "
                f"image, the batch has {list(label.shape)}; set task.probe=false and task.neighbours=0"
            )
        return label


def build_mae(config: MaeConfig, model: ModelConfig, *, num_classes: int) -> MaeTask:
    """The task over a fresh encoder; `num_classes` is what the training data has (0: no labels).

    Raises ValueError for an encoder that would keep untrained parts, and where masks or targets are impossible.
    """
    encoder = build_model(model, num_classes=0)
    if not isinstance(encoder, ViT):
        raise ValueError(f"model.variant={model.variant}: MAE needs token access; use a ViT of vitfw, such as vit_b16")
    arch = encoder.arch
    for key, untrained in {
        "final_norm": arch.final_norm == "pooled",
        "pool": arch.pool == "map",
        "pre_head": arch.pre_head != "none",
        "mask_token": arch.mask_token,
    }.items():
        if untrained:
            fix = {"final_norm": "tokens", "pool": "cls (or gap)", "pre_head": "none", "mask_token": "false"}[key]
            raise ValueError(
                f"model.{key}={getattr(arch, key)}: MAE never uses this part, it would stay untrained; set "
                f"model.{key}={fix}, and choose it anew for fine-tuning"
            )
    if arch.window:
        raise ValueError(f"model.window={arch.window}: windows need the whole grid of patches; set model.window=0")
    if config.probe_pool == "cls" and not arch.class_token and (config.probe or config.neighbours) and num_classes:
        raise ValueError("task.probe_pool=cls: this encoder has no class token; set task.probe_pool=mean")
    kept_patches(arch.patches, config.mask_ratio)
    if config.normalise_target:
        normalise_patches(torch.zeros(arch.in_channels * arch.patch[0] * arch.patch[1]))
    shape = decoder_architecture(
        arch,
        width=config.decoder_width,
        depth=config.decoder_depth,
        heads=config.decoder_heads,
        mlp_ratio=config.decoder_mlp_ratio,
    )
    decoder = Decoder(shape, encoder_width=arch.width, prefix=arch.prefix)
    return MaeTask(encoder, decoder, config, num_classes=num_classes)


def _block_macs(blocks: nn.ModuleList, tokens: int, width: int) -> int:
    matrices = sum(p.numel() for p in blocks.parameters() if p.ndim == 2)
    return matrices * tokens + len(blocks) * 2 * tokens * tokens * width
