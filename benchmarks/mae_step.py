"""Time of one MAE training step beside the supervised step of the same encoder and beside a plain port of MAE.

    python benchmarks/mae_step.py --sizes s16,b16 --batch 8 --rounds 5 [--device cuda] [--precision bf16]

Everything is timed in turns (one step of each, again and again), so that a busy machine hurts all alike; the median
counts. Prints the ratios beside those counted in multiply-adds, and the shares of the step.
"""

import argparse
import platform
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitfw.models.blocks import Block, Context
from vitfw.models.build import build_model
from vitfw.models.decoder import decoder_architecture
from vitfw.models.masks import kept_patches
from vitfw.models.model_config import ModelConfig
from vitfw.models.patches import normalise_patches, patchify
from vitfw.models.vit import ViT
from vitfw.tasks.mae import MaeConfig, MaeTask, build_mae

SHAPES = {"ti16": (128, 2, 4), "s16": (512, 8, 16), "b16": (512, 8, 16), "l16": (512, 8, 16)}  # decoder of each encoder


class PlainMae(nn.Module):
    """MAE written the obvious way: embed every patch, gather, put the tokens back in order, predict all patches, mask the
    loss. The same mathematics and the same blocks."""

    def __init__(self, task: MaeTask) -> None:
        super().__init__()
        config, arch = task.config, task.encoder.arch
        shape = decoder_architecture(
            arch, width=config.decoder_width, depth=config.decoder_depth, heads=config.decoder_heads, mlp_ratio=4.0
        )
        self.encoder, self.parts = task.encoder, task.decoder
        self.blocks = nn.ModuleList(Block(shape, i) for i in range(shape.depth))
        self.blocks.load_state_dict(task.decoder.blocks.state_dict())

    def forward(self, images: Tensor, noise: Tensor) -> Tensor:
        patches = self.encoder.arch.patches
        kept = kept_patches(patches, 0.75)
        shuffle = noise.argsort(dim=1)
        restore = shuffle.argsort(dim=1)
        tokens = self.parts.embed(self.encoder(images, keep=shuffle[:, :kept], output="tokens"))
        hidden = self.parts.mask_token.expand(len(tokens), patches - kept, -1)
        full = torch.cat([tokens[:, 1:], hidden], dim=1)
        full = full.gather(1, restore[:, :, None].expand(-1, -1, full.shape[2])) + self.parts.pos_embed
        x = torch.cat([tokens[:, :1], full], dim=1)
        for block in self.blocks:
            x, _ = block(x, Context())
        predicted = self.parts.pred(self.parts.norm(x))[:, 1:]
        target = normalise_patches(patchify(images, self.encoder.patch_size))
        mask = torch.ones_like(noise)
        mask[:, :kept] = 0
        mask = mask.gather(1, restore)
        error = (predicted.float() - target).square().mean(-1)
        return (error * mask).sum() / mask.sum()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", default="s16")
    parser.add_argument("--decoder", help="WIDTHxDEPTHxHEADS instead of the paper's, such as 192x4x6")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    given = parser.parse_args()
    print(
        f"torch {torch.__version__}, {platform.machine()}, {torch.get_num_threads()} threads, {given.device}, {given.precision}"
    )
    for size in given.sizes.split(","):
        compare(size, given)


def compare(size: str, given: argparse.Namespace) -> None:
    """Prints the ratios of one encoder."""
    torch.manual_seed(0)
    width, depth, heads = map(int, given.decoder.split("x")) if given.decoder else SHAPES[size]
    config = MaeConfig(decoder_width=width, decoder_depth=depth, decoder_heads=heads, neighbours=0)
    model = ModelConfig(variant=f"mae_{size}")
    task = build_mae(config, model, num_classes=1000).to(given.device)
    alone = build_mae(config, model, num_classes=0).to(given.device)
    alone.load_state_dict({k: v for k, v in task.state_dict().items() if not k.startswith("probe.")})
    plain = PlainMae(alone).to(given.device)
    supervised = build_model(model, num_classes=1000).to(given.device)
    assert isinstance(supervised, ViT)
    images = torch.randn(given.batch, 3, 224, 224, device=given.device)
    batch = {"image": images, "label": torch.randint(1000, (given.batch,), device=given.device)}

    def plain_loss() -> Tensor:
        return plain(images, torch.rand(given.batch, 196, device=given.device))

    steps: dict[str, tuple[nn.Module, Callable[[], Tensor]]] = {
        "supervised": (supervised, lambda: F.cross_entropy(supervised(images).float(), batch["label"])),
        "mae": (alone, lambda: alone.losses(batch, 0.0)["loss"]),
        "mae with probe": (task, lambda: task.losses(batch, 0.0)["loss"]),
        "plain port": (plain, plain_loss),
    }
    check_equal(alone, plain, images)
    times = measure(steps, given)
    encoder, decoder = alone.macs()
    full = supervised_macs(supervised)
    base = times["supervised"]
    print(f"{size}, batch {given.batch}, decoder {width} x {depth}: {alone.cost_text()}")
    print(f"  counted  MAE : supervised = {(encoder + decoder) / full:.2f}")
    for name, value in times.items():
        print(
            f"  {name:<16}{1e3 * value:9.1f} ms   {value / base:5.2f} x supervised   {value / times['mae']:5.2f} x MAE"
        )


def check_equal(task: MaeTask, plain: PlainMae, images: Tensor) -> None:
    """Both give the same loss, so that the times compare the same work."""
    noise = torch.rand(len(images), 196, device=images.device)
    with torch.no_grad():
        ours, theirs = task.reconstruct(images, noise)[0].mean(), plain(images, noise)
    assert abs(ours - theirs) < 1e-4 * theirs, f"losses differ: {ours} and {theirs}"


def supervised_macs(model: ViT) -> int:
    tokens = 197
    matrices = sum(p.numel() for p in model.blocks.parameters() if p.ndim == 2)
    attention = 2 * tokens * tokens * model.embed_dim * model.depth
    return matrices * tokens + attention + 196 * model.patch_embed.proj.weight.numel()


def measure(steps: dict[str, tuple[nn.Module, Callable[[], Tensor]]], given: argparse.Namespace) -> dict[str, float]:
    """Median seconds of forward, backward and update of each, timed in turns."""
    optimizers = {name: torch.optim.AdamW(module.parameters(), lr=1e-4) for name, (module, _) in steps.items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    # on a CPU the process's own time counts: another process on the machine then changes little
    clock = time.process_time if given.device == "cpu" else time.perf_counter
    for turn in range(given.rounds + 1):
        for name, (_, loss_of) in steps.items():
            wait(given.device)
            start = clock()
            with torch.autocast(given.device, torch.bfloat16, enabled=given.precision == "bf16"):
                loss = loss_of()
            loss.backward()
            optimizers[name].step()
            optimizers[name].zero_grad()
            wait(given.device)
            if turn:  # the first turn warms up
                times[name].append(clock() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
