"""Patches, masks, positions and the decoder, against formulas, numpy lines and the published code's own numbers."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from vitfw.models.build import build_model
from vitfw.models.mae_weights import from_published, to_published
from vitfw.models.masks import (
    binary_mask,
    grid_side,
    kept_patches,
    numbers_needed,
    patch_order,
    split_order,
)
from vitfw.models.neighbours import NeighbourAccuracy
from vitfw.models.patches import normalise_patches, patchify, take_patches, unpatchify
from vitfw.models.positions import sincos_table
from vitfw.models.variants import ModelConfig
from vitfw.tasks.mae import MaeConfig, MaeTask, build_mae

GOLDENS = load_file(Path(__file__).parent / "goldens" / "mae_reference.safetensors")
sizes = st.integers(1, 5)


def golden_task(tag: str) -> MaeTask:
    """The published code's tiny model of this tag, with its weights."""
    patch, size, depth = {"norm": (4, 32, 1), "plain": (8, 24, 2)}[tag]
    model = ModelConfig(variant=f"mae_ti{patch}", image_size=size, width=48, depth=2, heads=3)
    config = MaeConfig(decoder_width=32, decoder_depth=depth, decoder_heads=2, normalise_target=tag == "norm")
    task = build_mae(config, model, num_classes=0)
    task.load_state_dict(from_published(published(tag)))
    return task


def published(tag: str) -> dict[str, torch.Tensor]:
    start = f"{tag}.weight."
    return {name.removeprefix(start): value for name, value in GOLDENS.items() if name.startswith(start)}


@pytest.mark.parametrize("tag", ["norm", "plain"])
def test_published_numbers(tag: str) -> None:
    task = golden_task(tag)
    image, noise = GOLDENS[f"{tag}.image"], GOLDENS[f"{tag}.noise"]
    visible, removed = task.masks(image, noise)
    loss, tokens = task.reconstruct(image, noise)
    loss.mean().backward()
    assert torch.equal(patchify(image, task.encoder.patch_size), GOLDENS[f"{tag}.patches"])
    assert torch.equal(binary_mask(removed, noise.shape[1]), GOLDENS[f"{tag}.mask"])
    pred = GOLDENS[f"{tag}.pred"]
    torch.testing.assert_close(task.decoder(tokens, visible, removed, everywhere=True), pred, rtol=0, atol=1e-5)
    some = task.decoder(tokens, visible, removed)
    torch.testing.assert_close(
        some, pred.gather(1, removed[:, :, None].expand(-1, -1, pred.shape[2])), rtol=0, atol=1e-5
    )
    torch.testing.assert_close(loss.mean(), GOLDENS[f"{tag}.loss"][0], rtol=0, atol=1e-5)
    gradients = {k.removeprefix(f"{tag}.grad."): v for k, v in GOLDENS.items() if k.startswith(f"{tag}.grad.")}
    assert len(gradients) == 5
    for name, value in from_published(gradients).items():
        torch.testing.assert_close(task.get_parameter(name).grad, value, rtol=0, atol=1e-5)


@pytest.mark.parametrize("tag", ["norm", "plain"])
def test_published_names_and_back(tag: str) -> None:
    """Our state dict under the published names is the published file, tensor for tensor."""
    task, file = golden_task(tag), published(tag)
    ours = to_published(task.state_dict())
    assert ours.keys() == file.keys()
    assert all(torch.equal(ours[name], file[name]) for name in file)


def test_loss_against_numpy() -> None:
    """The loss written out: unbiased variance, mean over the values of a patch, then over all removed patches."""
    task = golden_task("norm")
    image, noise = GOLDENS["norm.image"], GOLDENS["norm.noise"]
    pred, losses = GOLDENS["norm.pred"].numpy(), []
    for b in range(len(image)):
        gone = np.argsort(noise[b].numpy())[int(64 * 0.25) :]
        for n in gone:
            row, column = divmod(int(n), 8)
            patch = image[b, :, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4].numpy().transpose(1, 2, 0).ravel()
            target = (patch - patch.mean()) / np.sqrt(patch.var(ddof=1) + 1e-6)
            losses.append(((pred[b, n] - target) ** 2).mean())
    loss, _ = task.reconstruct(image, noise)
    assert loss.mean().item() == pytest.approx(np.mean(losses), abs=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"registers": 2, "position": "learned"},
        {"position": "learned", "position_prefix": False},
        {"position": "factorised"},
        {"position": "none", "rope": "centered", "registers": 1},
        {"image_height": 16, "image_width": 32, "patch_height": 4, "patch_width": 8, "in_channels": 5},
        {"mask_token": True},
    ],
    ids=["sincos", "registers", "no_prefix", "factorised", "rope", "oblong", "masked"],
)
def test_only_kept_patches_are_embedded(options: dict) -> None:
    """The tokens are those of embedding all patches and taking the kept ones, to 1e-6 of their size."""
    values = {"variant": "mae_ti4", "image_size": 16, "width": 48, "depth": 1, "heads": 2} | options
    encoder = build_model(ModelConfig(**values), num_classes=0)
    images = torch.randn(3, encoder.in_channels, *encoder.arch.image)
    patches = encoder.arch.patches
    keep = torch.rand(3, patches).argsort(dim=1)[:, : patches // 4]
    masked = torch.rand(3, patches) < 0.5 if encoder.arch.mask_token else None
    seen = []
    encoder.blocks[0].register_forward_pre_hook(lambda block, inputs: seen.append(inputs))
    encoder(images, masked=masked)
    encoder(images, keep=keep, masked=masked)
    front = torch.arange(encoder.num_prefix_tokens).expand(3, -1)
    index = torch.cat([front, keep + encoder.num_prefix_tokens], dim=1)
    (every, context, _), (kept, kept_context, _) = seen
    expected = every.gather(1, index[:, :, None].expand(-1, -1, 48))
    torch.testing.assert_close(kept, expected, rtol=1e-6, atol=1e-6 * expected.detach().abs().max().item())
    if context.rope is not None:
        assert torch.equal(kept_context.rope[:, 0], context.rope[0, 0][index])


def test_sincos_table() -> None:
    table = sincos_table((14, 14), 768)
    first = [0.841471, 0.815251, 0.788593]
    assert table[1, :3].tolist() == pytest.approx(first, abs=1e-6)  # column 1 of row 0
    assert table[1, 192:195].tolist() == pytest.approx([0.540302, 0.579108, 0.614915], abs=1e-6)
    assert table[1, 384:387].tolist() == [0, 0, 0]
    assert table[1, 576:579].tolist() == [1, 1, 1]
    assert table[195, :3].tolist() == pytest.approx([0.420167, -0.174370, -0.685756], abs=1e-6)
    assert table.sum().item() == pytest.approx(69594.494, abs=0.01)
    assert table.square().sum().item() == pytest.approx(75264, abs=0.01)


@settings(deadline=None, max_examples=30)
@given(rows=sizes, columns=sizes, height=sizes, width=sizes, channels=sizes)
def test_unpatchify_inverts_patchify(rows: int, columns: int, height: int, width: int, channels: int) -> None:
    images = torch.rand(2, channels, rows * height, columns * width)
    patches = patchify(images, (height, width))
    assert patches.shape == (2, rows * columns, height * width * channels)
    assert torch.equal(patches[:, 0, :channels], images[:, :, 0, 0])  # the top-left pixel, channel last
    assert torch.equal(unpatchify(patches, (height, width), (rows, columns)), images)
    chosen = torch.randint(rows * columns, (2, 3))
    assert torch.equal(take_patches(images, (height, width), chosen), patches[torch.arange(2)[:, None], chosen])


def test_cut_patches_are_refused() -> None:
    with pytest.raises(ValueError, match="30 x 32 pixels, not divisible by the patch 4 x 4"):
        patchify(torch.zeros(1, 3, 30, 32), (4, 4))
    with pytest.raises(ValueError, match=r"a grid of 2 x 2 patches of 4 x 4 pixels needs \[B, 4, 16 \* channels\]"):
        unpatchify(torch.zeros(1, 5, 48), (4, 4), (2, 2))


def test_normalised_targets() -> None:
    """P29: finite for patches of one colour; patches of one value, which have no variance, are refused."""
    patches = torch.rand(2, 5, 48) * 3
    target = normalise_patches(patches)
    assert target.mean(-1).abs().max() < 1e-6
    assert target.var(-1).sub(1).abs().max() < 1e-5
    assert torch.equal(normalise_patches(torch.full((1, 1, 48), 0.7)), torch.zeros(1, 1, 48))  # one colour: finite
    assert normalise_patches(patches.half()).dtype == torch.float32
    with pytest.raises(ValueError, match="a patch of 1 x 1 pixels with 1 channel has no variance"):
        normalise_patches(torch.zeros(3, 1))


@pytest.mark.parametrize(("patches", "kept"), [(196, 49), (256, 64), (64, 16), (49, 12)])
def test_kept_patches(patches: int, kept: int) -> None:
    assert kept_patches(patches, 0.75) == kept


def test_impossible_ratios_are_refused() -> None:
    with pytest.raises(ValueError, match=r"task.mask_ratio=0.9: keeps 0 of 4 patches"):
        kept_patches(4, 0.9)
    with pytest.raises(ValueError, match=r"task.mask_ratio=0.6: task.mask=grid keeps one patch of each s x s cell"):
        grid_side(0.6)
    assert [grid_side(r) for r in (0.75, 0.889, 0.9375)] == [2, 3, 4]


@settings(deadline=None, max_examples=40)
@given(
    kind=st.sampled_from(["random", "block", "grid"]),
    grid=st.tuples(st.integers(2, 9), st.integers(2, 9)),
    seed=st.integers(0, 1000),
)
def test_masks_have_a_fixed_count(kind, grid: tuple[int, int], seed: int) -> None:
    patches = grid[0] * grid[1]
    numbers = torch.rand(6, numbers_needed(kind, grid), generator=torch.Generator().manual_seed(seed))
    order = patch_order(kind, numbers, grid, 0.75)
    assert torch.equal(order.sort(1).values, torch.arange(patches).expand(6, -1))  # each patch once
    assert torch.equal(order, patch_order(kind, numbers, grid, 0.75))
    kept = kept_patches(patches, 0.75)
    visible, removed = split_order(order, kept)
    mask = binary_mask(removed, patches)
    assert torch.equal(mask.sum(1), torch.full((6,), float(patches - kept)))
    assert torch.equal(mask.gather(1, visible), torch.zeros(6, kept))


def test_random_masks_remove_each_patch_equally_often() -> None:
    torch.manual_seed(0)
    order = patch_order("random", torch.rand(4000, 16), (4, 4), 0.75)
    share = binary_mask(order[:, 4:], 16).mean(0)
    assert (share - 0.75).abs().max() < 4 * math.sqrt(0.75 * 0.25 / 4000)


def test_grid_mask_keeps_a_lattice() -> None:
    torch.manual_seed(0)
    order = patch_order("grid", torch.rand(64, numbers_needed("grid", (14, 14))), (14, 14), 0.75)
    kept = order[:, :49]
    rows, columns = kept // 14, kept % 14
    assert (rows % 2 == rows[:, :1] % 2).all()
    assert (columns % 2 == columns[:, :1] % 2).all()
    shifts = {(int(r) % 2, int(c) % 2) for r, c in zip(rows[:, 0], columns[:, 0], strict=True)}
    assert len(shifts) == 4  # all four lattices occur, so each patch is seen by the encoder


def test_block_mask_removes_connected_areas() -> None:
    """Neighbours of a removed patch are removed far more often than under random masks."""
    torch.manual_seed(0)

    def together(kind) -> float:
        order = patch_order(kind, torch.rand(200, numbers_needed(kind, (14, 14))), (14, 14), 0.5)
        mask = binary_mask(order[:, 98:], 196).view(200, 14, 14)
        return ((mask[:, :, 1:] * mask[:, :, :-1]).sum() / mask[:, :, :-1].sum()).item()

    assert together("random") == pytest.approx(0.5, abs=0.02)
    assert together("block") > 0.8


def test_neighbour_accuracy_against_a_loop() -> None:
    torch.manual_seed(0)
    features, labels = torch.randn(40, 6), torch.randint(3, (40,))
    features += 1.5 * torch.nn.functional.one_hot(labels, 6)
    labels[5] = -1
    metric = NeighbourAccuracy(3, k=5, temperature=0.07)
    for part in (slice(0, 13), slice(13, 40)):
        metric.update(features[part], labels[part])
    unit, hits = torch.nn.functional.normalize(features, dim=1), 0
    counted = [i for i in range(40) if labels[i] >= 0]
    for i in counted:
        near = sorted((j for j in counted if j != i), key=lambda j: -float(unit[i] @ unit[j]))[:5]
        votes = torch.zeros(3)
        for j in near:
            votes[labels[j]] += math.exp(float(unit[i] @ unit[j]) / 0.07)
        hits += int(votes.argmax() == labels[i])
    assert metric.compute().item() == pytest.approx(hits / 39)
