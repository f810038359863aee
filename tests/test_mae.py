"""The MAE task: what it costs, what it draws, what reaches the encoder, and that it runs everywhere."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from vitfw.config import find_file, load, names_of
from vitfw.data.augment import AugmentConfig
from vitfw.data.mix import BatchAugment
from vitfw.ema import EmaConfig
from vitfw.models.variants import ModelConfig
from vitfw.module import Module
from vitfw.optim import OptimConfig, resolve_learning_rate
from vitfw.schedules import Length, learning_rate
from vitfw.seeding import derive
from vitfw.tasks import build_task
from vitfw.tasks.mae import MaeConfig, MaeTask, build_mae

SMALL = {"decoder_width": 24, "decoder_depth": 2, "decoder_heads": 2}


def small_model(**options) -> ModelConfig:
    values = {"variant": "mae_ti4", "image_size": 16, "width": 32, "depth": 2, "heads": 2} | options
    return ModelConfig(**values)


def small_task(*, num_classes: int = 0, model: ModelConfig | None = None, **options) -> MaeTask:
    torch.manual_seed(0)
    return build_mae(MaeConfig(**(SMALL | options)), model or small_model(), num_classes=num_classes)


def small_batch(count: int = 8, *, channels: int = 3, size: tuple[int, int] = (16, 16), seed: int = 0) -> dict:
    generator = torch.Generator().manual_seed(seed)
    label = torch.randint(3, (count,), generator=generator)
    image = torch.randn(count, channels, *size, generator=generator) + label[:, None, None, None]
    return {"image": image, "label": label, "index": torch.arange(count)}


def score(task: MaeTask, *batches: dict) -> dict[str, float]:
    task.eval()
    measures = task.measures()
    with torch.no_grad():
        for batch in batches:
            task.measure(batch, measures)
    return task.results(measures)


def test_exact_target_gives_loss_zero() -> None:
    """P81: with the target as prediction the loss is 0, and one value of one removed patch moves its image's loss."""
    task, batch = small_task(), small_batch()
    numbers = torch.rand(8, 16)
    _, removed = task.masks(batch["image"], numbers)
    answer = task.targets(batch["image"], removed)

    class Fixed(nn.Module):
        def forward(self, tokens, visible, removed, *, grid):
            return answer

    task.decoder = Fixed()  # type: ignore[assignment]
    assert task.reconstruct(batch["image"], numbers)[0].abs().max() == 0
    answer = answer.clone()
    answer[0, 0, 0] += 1.0
    loss, _ = task.reconstruct(batch["image"], numbers)
    assert loss[0].item() == pytest.approx(1 / (12 * 48))
    assert loss[1:].abs().max() == 0


def test_visible_pixels_are_not_targets() -> None:
    """P81: targets of removed patches do not depend on visible pixels, and the encoder not on removed ones."""
    task, batch = small_task(), small_batch()
    numbers = torch.rand(8, 16)
    visible, removed = task.masks(batch["image"], numbers)
    mask = torch.zeros(8, 16).scatter_(1, removed, 1.0).view(8, 1, 4, 4)
    hidden = mask.repeat_interleave(4, 2).repeat_interleave(4, 3).bool()
    other = torch.where(hidden, batch["image"], torch.randn_like(batch["image"]))
    assert torch.equal(task.targets(batch["image"], removed), task.targets(other, removed))
    other = torch.where(hidden, torch.randn_like(batch["image"]), batch["image"])
    tokens = task.encoder(batch["image"], keep=visible, output="tokens")
    assert torch.equal(tokens, task.encoder(other, keep=visible, output="tokens"))


def test_masks_differ_between_images_and_follow_the_seed() -> None:
    """P81."""
    task, image = small_task(), small_batch()["image"]

    def draw(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return task.masks(image, torch.rand(8, 16))[1]

    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2))
    assert len({tuple(sorted(row.tolist())) for row in draw(1)}) > 1


def test_each_rank_draws_other_masks() -> None:
    """P20: in the same step two ranks remove other patches, and each of them the same ones when it starts again."""
    task, drawn = small_task(), []

    def masks(rank: int) -> torch.Tensor:
        module = Module(
            task,
            BatchAugment(AugmentConfig(mean=(0.5,), std=(0.5,))),
            optim=OptimConfig(lr=1e-3),
            length=Length(num_images=8, global_batch=8, steps_per_epoch=1, total_steps=1),
            ema=EmaConfig(),
            seed=0,
            accumulation=1,
            rank=rank,
            world=2,
        )
        module.training_step({"image": torch.zeros(4, 3, 16, 16, dtype=torch.uint8)}, 0)
        return drawn[-1]

    original = task.masks
    task.masks = lambda images, numbers: drawn.append(original(images, numbers)[1]) or original(images, numbers)
    first, second = masks(0), masks(1)
    assert not torch.equal(first, second)
    assert torch.equal(masks(0), first)


def test_training_draws_from_the_global_generator_alone() -> None:
    task, batch = small_task(), small_batch()
    torch.manual_seed(derive(0, "step", 3, 0))
    first = task.losses(batch, 0.0)["loss"]
    other_place = task.losses(batch, 0.0)["loss"]
    torch.manual_seed(derive(0, "step", 3, 0))
    assert torch.equal(task.losses(batch, 0.9)["loss"], first)
    assert not torch.equal(first, other_place)


@pytest.mark.parametrize("mask", ["random", "block", "grid"])
def test_evaluation_is_the_same_for_any_split_and_order(mask: str) -> None:
    """Masks hang on the sample's row: batches of any size, in any order, with padding, give the same loss."""
    task = small_task(num_classes=3, mask=mask)
    batch = small_batch(12)
    whole = score(task, batch)
    turned = {key: value.flip(0) for key, value in batch.items()}
    parts = [{key: value[a:b] for key, value in turned.items()} for a, b in ((0, 5), (5, 12))]
    padding = {"image": torch.randn(3, 3, 16, 16), "label": torch.zeros(3).long(), "index": torch.full((3,), -1)}
    assert score(task, *parts, padding) == pytest.approx(whole, rel=1e-6)
    torch.manual_seed(123)
    assert score(task, batch) == whole


def test_evaluation_is_deterministic_with_all_rates_on() -> None:
    """P83: encoder and decoder, and the probe's and the neighbours' features."""
    rates = {f"{key}_dropout": 0.5 for key in ("position", "projection", "attention")}
    noisy = small_task(num_classes=3, model=small_model(drop_path=0.5, dropout=0.5, **rates))
    plain = small_task(num_classes=3)
    plain.load_state_dict(noisy.state_dict())
    batch = small_batch()
    assert score(noisy, batch) == score(noisy, batch) == score(plain, batch)


def test_fused_and_explicit_attention_agree() -> None:
    """P83."""
    fused = small_task(model=small_model(attention="fused"))
    explicit = small_task(model=small_model(attention="explicit"))
    explicit.load_state_dict(fused.state_dict())
    numbers, image = torch.rand(8, 16), small_batch()["image"]
    torch.testing.assert_close(
        fused.reconstruct(image, numbers)[0], explicit.reconstruct(image, numbers)[0], rtol=0, atol=1e-5
    )


@pytest.mark.parametrize(("variant", "encoder", "decoder"), [("mae_b16", 4.41, 5.37), ("mae_l16", 15.38, 5.38)])
def test_counted_cost(variant: str, encoder: float, decoder: float) -> None:
    with torch.device("meta"):
        task = build_mae(MaeConfig(), ModelConfig(variant=variant), num_classes=0)
    counted = [round(macs / 1e9, 2) for macs in task.macs()]
    assert counted == [encoder, decoder]
    assert f"decoder / encoder = {decoder / encoder:.2f}" in task.cost_text()
    parameters = sum(p.numel() for p in task.parameters())
    # published: 111.9 M and 329.5 M, with both position tables counted
    tables = 197 * (task.encoder.embed_dim + 512)
    assert round((parameters + tables) / 1e6, 1) == {"mae_b16": 111.9, "mae_l16": 329.5}[variant]


def test_step_costs_what_is_counted() -> None:
    """Measured multiply-adds: the encoder's are those of a quarter of the tokens, and only these are embedded, which the
    published count does not leave out; the decoder's are below the count."""
    task = small_task(model=small_model(image_size=32, attention="explicit"))
    image = small_batch(2, size=(32, 32))["image"]
    visible, removed = task.masks(image, torch.rand(2, 64))
    with FlopCounterMode(display=False) as encoder_flops:
        tokens = task.encoder(image, keep=visible, output="tokens")
    with FlopCounterMode(display=False) as decoder_flops:
        task.decoder(tokens, visible, removed)
    encoder, decoder = task.macs()
    not_embedded = (64 - 16) * task.encoder.patch_embed.proj.weight.numel()
    assert encoder_flops.get_total_flops() == 2 * 2 * (encoder - not_embedded)
    assert 0.7 * decoder < decoder_flops.get_total_flops() / 4 < 0.95 * decoder


def test_labels_never_reach_the_encoder() -> None:
    """P25: the gradients and the reported loss are those of a task without a probe, bit for bit."""
    with_probe, without = small_task(num_classes=3), small_task(num_classes=3, probe=False, neighbours=0)
    without.load_state_dict({k: v for k, v in with_probe.state_dict().items() if not k.startswith("probe.")})
    batch, losses = small_batch(), []
    for task in (with_probe, without):
        torch.manual_seed(5)
        result = task.losses(batch, 0.0)
        result["loss"].backward()
        losses.append(result["loss"].detach())
    assert torch.equal(*losses)
    for name, parameter in without.named_parameters():
        assert torch.equal(with_probe.get_parameter(name).grad, parameter.grad), name
    assert with_probe.probe.head.weight.grad.abs().sum() > 0


def test_probe_is_the_published_one_and_learns() -> None:
    task, batch = small_task(num_classes=3), small_batch(64)
    assert not list(task.probe.norm.parameters())
    assert task.probe.norm.eps == 1e-6
    optimizer = torch.optim.AdamW(task.probe.parameters(), lr=0.03)
    for _ in range(60):
        optimizer.zero_grad()
        task.losses(batch, 0.0)["loss"].backward()
        optimizer.step()
    result = score(task, batch)
    assert result["probe_acc1"] > 75
    assert result["knn_k20_t0.07_acc1"] > 60
    before = task.probe.norm.running_mean.clone()
    score(task, batch)
    assert torch.equal(task.probe.norm.running_mean, before)


def test_unlabelled_images_leave_the_probe_alone() -> None:
    task, batch = small_task(num_classes=3), small_batch()
    losses = task.losses(batch | {"label": torch.full((8,), -1)}, 0.0)
    losses["loss"].backward()
    assert losses["loss"].isfinite()
    assert task.probe.head.weight.grad.abs().max() == 0  # there is a gradient, so that all ranks agree, and it is zero
    assert score(task, batch | {"label": torch.full((8,), -1)}).keys() == {"loss", "samples"}
    assert small_task(num_classes=0).probe is None


def test_multi_label_data_is_refused_by_the_probe() -> None:
    task, batch = small_task(num_classes=3), small_batch()
    with pytest.raises(ValueError, match=r"both need one label an image, the batch has \[8, 3\]; set task.probe=false"):
        task.losses(batch | {"label": torch.zeros(8, 3)}, 0.0)


@pytest.mark.parametrize(
    "model",
    [
        small_model(variant="mae_ti4", image_height=8, image_width=24),
        small_model(in_channels=5, patch_height=2, patch_width=8),
        small_model(registers=4, position="learned"),
        small_model(class_token=False, pool="gap", final_norm="tokens"),
        small_model(position="none", rope="centered", registers=2),
        small_model(position="none", rope="index", rope_temperature=1e4, rope_layout="interleaved"),
        small_model(layer_scale=0.1, qk_norm=True, mlp="swiglu", norm="rmsnorm", drop_path=0.2),
    ],
    ids=["wide", "channels", "registers", "no_class_token", "rope", "rope_index", "swiglu"],
)
def test_every_parameter_learns(model: ModelConfig) -> None:
    """Each parameter gets a gradient in each step, so distributed training needs no search for unused ones."""
    pool = "cls" if model.class_token is not False else "mean"
    task = small_task(model=model, num_classes=3, probe_pool=pool)
    size = (model.image_height or 16, model.image_width or 16)
    batch = small_batch(channels=model.in_channels, size=size)
    task.losses(batch, 0.0)["loss"].backward()
    assert not [name for name, parameter in task.named_parameters() if parameter.grad is None]
    layers = task.parameter_layers("last_block")
    assert layers.keys() == dict(task.named_parameters()).keys()
    assert score(task, batch)["loss"] > 0


def test_learning_on_one_batch() -> None:
    task, batch = small_task(), small_batch()
    optimizer = torch.optim.AdamW(task.parameters(), lr=3e-3)
    first = score(task, batch)["loss"]
    task.train()
    for _ in range(60):
        optimizer.zero_grad()
        task.losses(batch, 0.0)["loss"].backward()
        optimizer.step()
    assert score(task, batch)["loss"] < 0.9 * first


@pytest.mark.parametrize("mask", ["random", "block", "grid"])
def test_one_graph_under_compile(mask: str) -> None:
    """P82: the whole step is one graph, and a second batch of the same shape compiles nothing."""
    task = small_task(num_classes=3, mask=mask)
    eager = copy.deepcopy(task)
    compiled = torch.compile(task.losses, fullgraph=True, backend="eager")
    for seed in (1, 2):
        batch = small_batch(seed=seed)
        torch.manual_seed(seed)
        loss = compiled(batch, 0.0)["loss"]
        torch.manual_seed(seed)
        assert torch.equal(loss, eager.losses(batch, 0.0)["loss"])
    loss.backward()


def test_bf16_autocast_keeps_loss_and_target_in_fp32() -> None:
    """P29."""
    task, batch = small_task(num_classes=3), small_batch()
    numbers = torch.rand(8, 16)
    exact, _ = task.reconstruct(batch["image"], numbers)
    with torch.autocast("cpu", torch.bfloat16):
        loss, _ = task.reconstruct(batch["image"], numbers)
        assert task.targets(batch["image"], torch.arange(16).expand(8, -1)).dtype == torch.float32
        task.losses(batch, 0.0)["loss"].backward()
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, exact, rtol=0.02, atol=0)


def test_images_of_one_colour_stay_finite() -> None:
    """P29."""
    task = small_task()
    losses = task.losses({"image": torch.full((4, 3, 16, 16), 0.3)}, 0.0)
    losses["loss"].backward()
    assert losses["loss"].isfinite()
    assert all(p.grad.isfinite().all() for p in task.parameters())


def test_initialisation_follows_the_source() -> None:
    with torch.device("cpu"):
        torch.manual_seed(0)
        task = build_mae(MaeConfig(), ModelConfig(variant="mae_ti16", depth=1), num_classes=0)
    for name, parameter in task.named_parameters():
        if name.endswith(("mask_token", "cls_token")):
            assert parameter.std().item() == pytest.approx(0.02, rel=0.2)
        elif name.endswith("weight") and parameter.ndim > 1:  # Glorot uniform over the flattened kernel
            bound = (6 / (parameter[0].numel() + parameter.shape[0])) ** 0.5
            assert 0.98 * bound < parameter.abs().max().item() <= bound, name
            assert parameter.std().item() == pytest.approx(bound / 3**0.5, rel=0.02)
        elif name.endswith("bias") and "patch_embed" not in name:
            assert not parameter.any(), name
    assert not task.encoder.get_buffer("pos_embed").requires_grad


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"mask_ratio": 1.0}, "task.mask_ratio=1.0: must lie between 0 and 1"),
        ({"mask": "grid", "mask_ratio": 0.5}, "task.mask_ratio=0.5: task.mask=grid keeps one patch of each s x s cell"),
        ({"decoder_width": 30}, "task.decoder_width=30: must be divisible by 4"),
        ({"decoder_depth": 0}, "task.decoder_depth=0: must be above 0"),
        ({"neighbours": -1}, r"task.neighbours=-1: must be 0 \(none\) or more"),
    ],
)
def test_wrong_options_are_refused(options: dict, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        MaeConfig(**options)


@pytest.mark.parametrize(
    ("model", "options", "text"),
    [
        (small_model(variant="timm:vit_tiny_patch16_224"), {}, "MAE needs token access"),
        (small_model(final_norm="pooled", pool="gap"), {}, "model.final_norm=pooled: MAE never uses this part"),
        (small_model(pool="map"), {}, "model.pool=map: MAE never uses this part"),
        (small_model(mask_token=True), {}, "model.mask_token=True: MAE never uses this part"),
        (small_model(pre_head="tanh"), {}, "model.pre_head=tanh: MAE never uses this part"),
        (
            small_model(class_token=False, pool="gap", final_norm="tokens"),
            {},
            "task.probe_pool=cls: this encoder has no",
        ),
        (small_model(image_size=8), {"mask_ratio": 0.9}, "task.mask_ratio=0.9: keeps 0 of 4 patches"),
        (small_model(patch_size=1, in_channels=1), {}, "a patch of 1 x 1 pixels with 1 channel has no variance"),
        (
            small_model(class_token=False, pool="gap", final_norm="tokens", window=2),
            {"probe_pool": "mean"},
            "model.window=2: windows need the whole grid",
        ),
    ],
)
def test_impossible_encoders_are_refused(model: ModelConfig, options: dict, text: str) -> None:
    if model.variant.startswith("timm:"):
        model = ModelConfig(variant=model.variant)
    with pytest.raises(ValueError, match=text):
        small_task(model=model, num_classes=3, **options)


@pytest.mark.parametrize("name", [name for name in names_of("recipes") if name.startswith("mae_")])
def test_recipes_build_and_state_their_cost(name: str) -> None:
    """The ratio in a recipe's header is the one of its sizes; from S down, and for CIFAR, it is below half."""
    config = load([f"recipe={name}"])
    with torch.device("meta"):
        task = build_task(config.task, config.model, num_classes=10 if "digits" in name else 1000)
    if not isinstance(task, MaeTask):
        return
    encoder, decoder = task.macs()
    assert f"Decoder / encoder cost: {decoder / encoder:.2f}" in find_file("recipes", name).read_text()
    if not name.startswith(("mae_b", "mae_l", "mae_h")):
        assert decoder < 0.5 * encoder


@pytest.mark.parametrize("name", ["mae_b", "mae_l", "mae_h", "mae_s", "mae_ti"])
def test_recipes_have_the_published_schedule(name: str) -> None:
    config = load([f"recipe={name}"])
    rate = resolve_learning_rate(config.optim, config.train.global_batch)
    assert rate.value == pytest.approx(2.4e-3)
    length = Length(num_images=1_281_167, global_batch=4096, steps_per_epoch=312, total_steps=800 * 312)
    points = {0.5: 3e-5, 1: 6e-5, 20: 1.2e-3, 40: 2.4e-3, 200: 2.147e-3, 420: 1.2e-3, 600: 3.873e-4, 800: 0.0}
    for epoch, expected in points.items():
        images = round(epoch * length.images_per_epoch)
        assert learning_rate(config.optim, rate.value, images, length) == pytest.approx(expected, rel=1e-3, abs=1e-9)
    assert (config.optim.betas, config.optim.clip_norm, config.model.drop_path) == ((0.9, 0.95), None, 0.0)


@pytest.mark.parametrize(("size", "decay", "peak"), [("b", 0.65, 2e-3), ("l", 0.75, 4e-3), ("h", 0.75, 4e-3)])
def test_fine_tuning_has_the_published_settings(size: str, decay: float, peak: float) -> None:
    config = load([f"recipe=mae_{size}_finetune"])
    assert config.optim.layer_decay == decay
    assert resolve_learning_rate(config.optim, config.train.global_batch).value == pytest.approx(peak)
    assert (config.optim.no_decay, config.optim.norm_layer) == ("mae_finetune", "head")
