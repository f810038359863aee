"""Time of one MAE training step beside the supervised step of the same encoder and beside a plain port of MAE.

    python benchmarks/mae_step.py --write docs/results.md [--cases s16:192x4x6] [--batch 4] [--rounds 3] [--device cuda]

Everything, in fp32 and under bfloat16 autocast, is timed in turns (one step of each, again and again), so that a busy machine
hurts all alike; the median counts. Prints the ratios beside those counted in multiply-adds; with --write it replaces the section
"Cost of an MAE step" of that file.
"""

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

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
from vitfw.run import source_commit
from vitfw.tasks.mae import MaeConfig, MaeTask, build_mae

TITLE = "## Cost of an MAE step"
CASES = (
    "s16:512x8x16,s16:192x4x6,b16:512x8x16"  # encoder:decoder; the paper's decoder, that of recipe mae_s, the paper's
)
PRECISIONS = ("fp32", "bf16")
STEPS = ("supervised", "mae", "mae with probe", "plain port")


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
        tokens = self.parts.embed(self.encode(images, shuffle[:, :kept]))
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

    def encode(self, images: Tensor, keep: Tensor) -> Tensor:
        """All patches embedded, then the kept ones gathered."""
        encoder = self.encoder
        x = encoder.patch_embed(images) + encoder.pos_embed[:, 1:]
        x = x.gather(1, keep[:, :, None].expand(-1, -1, x.shape[2]))
        x = torch.cat([(encoder.cls_token + encoder.pos_embed[:, :1]).expand(len(x), -1, -1), x], dim=1)
        for block in encoder.blocks:
            x, _ = block(x, Context())
        return encoder.norm(x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=CASES, help="ENCODER:WIDTHxDEPTHxHEADS of the decoder, with commas")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--write", type=Path, help="the file whose section is replaced")
    given = parser.parse_args()
    rows = [compare(*case.split(":"), given) for case in given.cases.split(",")]
    text = report(rows, given)
    print(text)
    if given.write is not None:
        write_section(given.write, text)


def compare(size: str, decoder: str, given: argparse.Namespace) -> str:
    """The row of one encoder and decoder."""
    torch.manual_seed(0)
    width, depth, heads = map(int, decoder.split("x"))
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

    losses: dict[str, tuple[nn.Module, Callable[[], Tensor]]] = {
        "supervised": (supervised, lambda: F.cross_entropy(supervised(images).float(), batch["label"])),
        "mae": (alone, lambda: alone.losses(batch, 0.0)["loss"]),
        "mae with probe": (task, lambda: task.losses(batch, 0.0)["loss"]),
        "plain port": (plain, plain_loss),
    }
    check_equal(alone, plain, images)
    times = measure(losses, given)
    counted = sum(alone.macs()) / supervised_macs(supervised)
    ratios = [f"{times['mae', p] / times['supervised', p]:.2f}" for p in PRECISIONS]
    beside = [f"{times[step, p] / times['mae', p]:.2f}" for step in STEPS[2:] for p in PRECISIONS]
    seconds = [f"{times['mae', p]:.2f} s" for p in PRECISIONS]
    cells = [f"{size[:-2].upper()}/{size[-2:]}, {width} x {depth}", f"{counted:.2f}", *ratios, *beside, *seconds]
    print("| " + " | ".join(cells) + " |", flush=True)
    return "| " + " | ".join(cells) + " |"


def report(rows: list[str], given: argparse.Namespace) -> str:
    """The section."""
    clock = "CPU time of one thread" if given.device == "cpu" else "time"
    commit = (source_commit() or "unknown")[:12]
    heads = ["encoder, decoder", "counted MAE : supervised", "fp32", "bf16", "with probe / MAE, fp32", "bf16"]
    heads += ["plain port / MAE, fp32", "bf16", "MAE step, fp32", "bf16"]
    return "\n".join(
        [
            TITLE,
            "",
            f"`python benchmarks/mae_step.py`: forward, backward and AdamW at 224 pixels, {given.batch} images, {clock},",
            f"median of {given.rounds} rounds in turns; commit {commit}, torch {torch.__version__}, {platform.machine()}, "
            f"{given.device}, {torch.get_num_threads()} thread.",
            "bf16: autocast, fp32 weights. Where other work shares the machine, differences of 5 % are noise.",
            "",
            f"| {' | '.join(heads)} |",
            "|" + "---|" * len(heads),
            *rows,
            "",
            f"With {given.batch} images the optimiser's fixed share raises the ratios of cheap steps above the counted ones.",
            "A plain port embeds every patch, sorts the tokens back, predicts all patches and masks the loss.",
            "",
        ]
    )


def write_section(path: Path, text: str) -> None:
    """Puts the section in its place, or at the end."""
    old = path.read_text(encoding="utf-8") if path.exists() else "# Results\n"
    before, found, after = old.partition(TITLE + "\n")
    rest = after.partition("\n## ")
    tail = f"\n## {rest[2]}" if found and rest[1] else ""
    path.write_text(f"{before.rstrip()}\n\n{text}{tail}", encoding="utf-8")


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


def measure(
    losses: dict[str, tuple[nn.Module, Callable[[], Tensor]]], given: argparse.Namespace
) -> dict[tuple[str, str], float]:
    """Median seconds of forward, backward and update of each step in each precision, timed in turns."""
    optimizers = {name: torch.optim.AdamW(module.parameters(), lr=1e-4) for name, (module, _) in losses.items()}
    times: dict[tuple[str, str], list[float]] = {(name, precision): [] for name in losses for precision in PRECISIONS}
    # on a CPU the process's own time counts: another process on the machine then changes little
    clock = time.process_time if given.device == "cpu" else time.perf_counter
    for turn in range(given.rounds + 1):
        for name, precision in times:
            wait(given.device)
            start = clock()
            with torch.autocast(given.device, torch.bfloat16, enabled=precision == "bf16"):
                loss = losses[name][1]()
            loss.backward()
            optimizers[name].step()
            optimizers[name].zero_grad()
            wait(given.device)
            if turn:  # the first turn warms up
                times[name, precision].append(clock() - start)
    return {key: statistics.median(values) for key, values in times.items()}


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
