"""One-image augmentation against timm's and torchvision's own pipelines, and what Pillow 13 breaks in them."""

import pickle
import typing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from timm.data import create_transform
from timm.data.auto_augment import AugmentOp
from torchvision.transforms import InterpolationMode, v2

from vitfw.data import augment
from vitfw.data.augment import AugmentConfig, PolicyName, eval_transform, resolve_policy, statistics, train_transform
from vitfw.data.operations import build_operations
from vitfw.data.policies import POLICIES, STATISTICS
from vitfw.data.sheet import contact_sheet
from vitfw.data.timm_guard import guard_posterize, posterize
from vitfw.seeding import seed_all

BICUBIC = InterpolationMode.BICUBIC


def picture(width: int, height: int, mode: str = "RGB", seed: int = 0) -> Image.Image:
    """Smooth and coloured, so that resampling and colour operations have something to do."""
    x, y = np.meshgrid(np.linspace(0, 6, width), np.linspace(0, 4, height))
    planes = [np.sin(x * (k + 1) + seed) * np.cos(y + k) for k in range(3)]
    return Image.fromarray((np.stack(planes, -1) * 127 + 128).astype(np.uint8)).convert(mode)


def pixels(image: Image.Image | torch.Tensor) -> torch.Tensor:
    return image if isinstance(image, torch.Tensor) else v2.functional.pil_to_tensor(image)


def test_policy_names_agree() -> None:
    assert set(typing.get_args(PolicyName)) == set(POLICIES)
    assert all(policy.statistics in STATISTICS for policy in POLICIES.values())


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_on_colour_and_grey(name: PolicyName) -> None:
    for channels, mode in ((3, "RGB"), (1, "L")):
        config = AugmentConfig(policy=name, statistics="inception")
        train = pickle.loads(pickle.dumps(train_transform(config, size=(32, 40), channels=channels)))
        evaluate = eval_transform(config, size=(32, 40), channels=channels)
        for seed, (width, height) in enumerate([(90, 60), (40, 200), (33, 32), (5, 7)]):
            seed_all(seed)
            for transform in (train, evaluate):
                out = transform(picture(width, height, mode))
                assert out.shape == (channels, 32, 40)
                assert out.dtype == torch.uint8
                assert out.is_contiguous()


@settings(deadline=None, max_examples=25)
@given(width=st.integers(1, 70), height=st.integers(1, 70), crop=st.sampled_from(["resized", "resized_once", "random", "simple", "padded", "center", "squash"]), seed=st.integers(0, 1000))  # fmt: skip  # noqa: E501
def test_every_crop_on_every_size(width: int, height: int, crop, seed: int) -> None:
    """Also on six channels, as a tensor."""
    size = (16, 12)
    transform = train_transform(AugmentConfig(crop=crop, statistics="inception"), size=size, channels=6)
    torch.manual_seed(seed)
    box = transform.box(height, width)
    if box is not None:
        top, left, rows, columns = box
        assert 0 <= top <= top + rows <= height and 0 <= left <= left + columns <= width and rows * columns > 0
    image = torch.randint(0, 256, (6, height, width), dtype=torch.uint8)
    assert transform(image).shape == (6, *size)


def test_mae_equals_torchvision_bit_for_bit() -> None:
    """Crop of 20 to 100 % with ten tries, bicubic, flip: the same draws from torch's generator."""
    reference = v2.Compose(
        [v2.RandomResizedCrop(48, (0.2, 1.0), interpolation=BICUBIC), v2.RandomHorizontalFlip(), v2.PILToTensor()]
    )
    transform, image = train_transform(AugmentConfig(policy="mae"), size=(48, 48)), picture(130, 90)
    for seed in range(20):
        outs = []
        for candidate in (transform, reference):
            torch.manual_seed(seed)
            outs.append(candidate(image))
        assert torch.equal(*outs)


@pytest.mark.parametrize(
    ("config", "reference"),
    [
        (
            AugmentConfig(policy="deit3", crop="simple", operations="", color_jitter=0.0),
            [v2.Resize(32, BICUBIC), v2.RandomCrop(32, padding=4, padding_mode="reflect")],
        ),
        (AugmentConfig(policy="flip_crop"), [v2.Resize(32, BICUBIC), v2.RandomCrop(32, padding=4)]),
        (
            AugmentConfig(policy="flip_crop", crop="random", train_crop=6 / 7),
            [v2.Resize(37, BICUBIC), v2.RandomCrop(32)],
        ),
    ],
    ids=["simple random crop of DeiT III", "padded crop of CIFAR", "448 to 384 of big_vision's transfer"],
)
def test_other_crops_equal_torchvision(config: AugmentConfig, reference: list) -> None:
    transform = train_transform(config, size=(32, 32))
    pipeline = v2.Compose([*reference, v2.RandomHorizontalFlip(), v2.PILToTensor()])
    for image in (picture(64, 48), picture(32, 32)):
        for seed in range(10):
            outs = []
            for candidate in (transform, pipeline):
                torch.manual_seed(seed)
                outs.append(candidate(image))
            assert torch.equal(*outs)


@pytest.mark.parametrize("share", [0.875, 0.9, 1.0])
@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
def test_evaluation_equals_timm(share: float, interpolation) -> None:
    """P71: 224 at 0.875 is resize 256, at 0.9 resize 248; here 56 from 64 and 62."""
    transform = eval_transform(AugmentConfig(eval_crop=share, eval_interpolation=interpolation), size=(56, 56))
    reference = create_transform(
        56, is_training=False, crop_pct=share, interpolation=interpolation, normalize=False, use_prefetcher=True
    )
    for width, height in ((100, 75), (64, 64), (60, 131), (56, 40)):
        image = picture(width, height)
        assert torch.equal(transform(image), torch.as_tensor(np.asarray(reference(image))))


def test_evaluation_of_bigvision_and_of_augreg() -> None:
    image = picture(100, 80)
    transform = eval_transform(AugmentConfig(policy="bigvision"), size=(56, 56))
    area = v2.Compose([v2.Resize(64, InterpolationMode.BOX), v2.CenterCrop(56), v2.PILToTensor()])
    assert torch.equal(transform(image), area(image))
    squash = AugmentConfig(policy="augreg_none", eval_resize="squash", eval_interpolation="bilinear")
    assert torch.equal(eval_transform(squash, size=(56, 56))(image), v2.PILToTensor()(v2.Resize((56, 56))(image)))


def test_randaugment_is_deits_own() -> None:
    """The policy that timm's create_transform builds for DeiT, drawn with the same seed: the same image."""
    full = create_transform(
        64, is_training=True, color_jitter=0.3, auto_augment="rand-m9-mstd0.5-inc1", interpolation="bicubic"
    )
    theirs = guard_posterize(full.transforms[2])
    ours = build_operations("rand-m9-mstd0.5-inc1", (64, 64), STATISTICS["imagenet"][0], "bicubic", 3)
    assert ours is not None
    names = [operation.name for operation in theirs.ops]
    assert names == [operation.name for operation in ours.ops]  # type: ignore[attr-defined]
    image = picture(64, 64)
    for seed in range(100):
        outs = []
        for policy in (ours, theirs):
            seed_all(seed)
            outs.append(pixels(policy(image)))
        assert torch.equal(*outs)


def test_posterize_survives_20_000_draws() -> None:
    """timm asks Pillow 13 for 0 bits at full magnitude, which raises; the guard gives older Pillows' black image."""
    policy, image = build_operations("rand-m9-mstd0.5-inc1", (8, 8), (0.5,) * 3, "bicubic", 3), picture(8, 8)
    assert policy is not None
    seed_all(0)
    for _ in range(20_000):
        policy(image)
    assert pixels(posterize(image, 0)).sum() == 0
    assert posterize(image, 8) is image
    assert torch.equal(pixels(posterize(image, 3)), pixels(image) & 0b11100000)
    full = AugmentOp("PosterizeIncreasing", prob=1.0, magnitude=10)
    holder = type("Policy", (), {"ops": [full]})()
    assert pixels(guard_posterize(holder).ops[0](image)).sum() == 0
    for name in ("original", "v0", "augmix-m5-w4-d2"):
        other = build_operations(name, (8, 8), (0.5,) * 3, "bicubic", 3)
        assert other is not None
        for _ in range(200):
            other(image)


@pytest.mark.parametrize(
    ("policy", "magnitude", "bound"), [("bigvision", 10, 20), ("augreg_light1", 0, 20), ("augreg_strong2", 20, 20)]
)
def test_bigvision_levels(policy: PolicyName, magnitude: int, bound: int) -> None:
    """Two operations, always applied, without noise, and not cut at magnitude 10."""
    operations = train_transform(AugmentConfig(policy=policy), size=(32, 32)).operations
    assert operations is not None
    assert operations.num_layers == 2  # type: ignore[attr-defined]
    for operation in operations.ops:  # type: ignore[attr-defined]
        assert (operation.prob, operation.magnitude, operation.magnitude_std) == (1.0, magnitude, 0)
        assert operation.magnitude_max == bound


def test_three_augment() -> None:
    """Exactly one of greyscale, solarise, blur on each image, each about as often; colour jitter stays on."""
    transform = train_transform(AugmentConfig(policy="deit3"), size=(32, 32))
    assert transform.jitter is not None
    assert transform.jitter.brightness == transform.jitter.saturation == (0.7, 1.3)
    image, kinds = picture(32, 32), {"grey": 0, "solarise": 0, "blur": 0}
    seed_all(0)
    for _ in range(300):
        assert transform.operations is not None
        out = pixels(transform.operations(image)).int()
        grey = bool((out[0] == out[1]).all() and (out[1] == out[2]).all())
        solarised = torch.equal(out, torch.where(pixels(image) < 128, pixels(image), 255 - pixels(image)).int())
        kinds["grey" if grey else "solarise" if solarised else "blur"] += 1
    assert all(70 < count < 130 for count in kinds.values())


def test_digits_are_never_mirrored() -> None:
    bar = Image.new("L", (8, 8))
    bar.paste(255, (0, 0, 2, 8))  # at the left edge
    digits, mirrored = (
        train_transform(AugmentConfig(policy=name, statistics="inception", padding=1), size=(8, 8), channels=1)
        for name in ("digits", "flip_crop")
    )
    seed_all(0)
    assert all(digits(bar)[0, 4, 5:].max() == 0 for _ in range(50))
    assert any(mirrored(bar)[0, 4, 5:].max() == 255 for _ in range(50))


def test_box_and_finish_are_the_call_in_two_parts() -> None:
    """A reader that decodes only the crop gets the same tensor from the same seeds."""
    transform, image = train_transform(AugmentConfig(policy="deit"), size=(24, 24)), picture(80, 60)
    for seed in range(10):
        seed_all(seed)
        whole = transform(image)
        seed_all(seed)
        box = transform.box(60, 80)
        assert box is not None
        top, left, rows, columns = box
        assert torch.equal(transform.finish(image.crop((left, top, left + columns, top + rows))), whole)


def test_one_try_crop_has_its_law() -> None:
    """MAE's probe: area uniform in [0.08, 1], log-uniform aspect, cut to the image; no ten tries, no fallback."""
    transform = train_transform(AugmentConfig(policy="mae_probe"), size=(8, 8))
    torch.manual_seed(0)
    boxes = [transform.box(1000, 1000) for _ in range(4000)]
    areas = torch.tensor([box[2] * box[3] / 1e6 for box in boxes if box is not None])
    assert areas.min() > 0.079
    assert areas.mean().item() == pytest.approx(0.533, abs=0.02)  # a little below 0.54: cut where a side is too long
    assert sum(box[2] == 1000 or box[3] == 1000 for box in boxes if box is not None) > 100


def test_overrides_and_statistics() -> None:
    policy = resolve_policy(AugmentConfig(policy="deit", scale=(0.2, 1.0), operations="", flip=0.0))
    assert (policy.scale, policy.operations, policy.flip) == ((0.2, 1.0), "", 0.0)
    assert statistics(AugmentConfig(policy="deit"), 3)[0] == (0.485, 0.456, 0.406)
    assert statistics(AugmentConfig(policy="bigvision"), 5) == ((0.5,) * 5, (0.5,) * 5)
    assert statistics(AugmentConfig(mean=(0.1,), std=(0.3,)), 1) == ((0.1,), (0.3,))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"flip": 1.5}, r"augment.flip=1.5: a probability must lie in \[0, 1\]"),
        ({"mixup": -1.0}, "augment.mixup=-1.0: must be 0 or more"),
        ({"scale": (0.5, 0.2), "policy": "deit"}, "augment.scale=.*must rise within"),
        ({"scale": (0.5, 1.0), "policy": "cifar10"}, "crop=padded does not read it; use crop=resized"),
        (
            {"train_crop": 0.9, "policy": "deit"},
            "augment.train_crop=0.9: crop=resized does not read it; use crop=random",
        ),
        ({"padding": 2, "policy": "deit"}, "augment.padding=2: crop=resized does not read it"),
        ({"mean": (0.5,)}, "augment.mean and augment.std belong together"),
        (
            {"mean": (0.5,), "std": (0.5,), "statistics": "clip"},
            "augment.statistics=clip and augment.mean are both set",
        ),
        ({"fold": True}, "augment.fold=true: there is no mixup to fold"),
        ({"repeats": 0}, "augment.repeats=0"),
        ({"eval_resize": "squash", "eval_crop": 0.9}, "eval_resize=squash crops nothing"),
        ({"eval_crop": 0.0}, r"augment.eval_crop=0.0: must lie in \[0.1, 1\]"),
        ({"eval_crop": 1e-30}, r"augment.eval_crop=1e-30: must lie in \[0.1, 1\]"),
    ],
)
def test_section_refuses_contradictions(keys: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AugmentConfig(**keys)


@pytest.mark.parametrize(
    ("keys", "channels", "message"),
    [
        ({"policy": "deit"}, 1, "imagenet: 3 means and 3 deviations for 1 channels"),
        ({"policy": "deit", "statistics": "inception"}, 6, "works on 1 or 3 channels, not 6; set operations=''"),
        ({"operations": "rand-x9"}, 3, "augment.operations=rand-x9: timm does not know this policy"),
        ({"operations": "rand-m9-inc"}, 3, "rand-m9-inc: timm does not know this policy; e.g. rand-m9-mstd0.5-inc1"),
        *(
            ({"operations": name}, 3, f"augment.operations={name}: timm does not know this policy")
            for name in ("augmix-foo", "augmix-m", "augmix-n3", "original-foo", "v0-m9", "3a-x", "rand-tfoo")
        ),
        ({"operations": "tv-rand-n2-m31"}, 3, "tv-rand-n2-m31: torchvision's magnitudes m go from 0 to 30, not to 31"),
        ({"operations": "nonsense"}, 3, "augment.operations=nonsense: timm does not know this policy"),
        ({"operations": "tv-rand"}, 3, "augment.operations=tv-rand: not one of tv-rand-nN-mM, tv-trivial"),
        ({"mean": (0.5,), "std": (0.0,)}, 3, "each deviation 0.001 or more"),
        ({"mean": (0.5,), "std": (1e-30,)}, 3, "each deviation 0.001 or more"),
        ({"mean": (float("nan"),), "std": (0.5,)}, 3, "finite numbers"),
    ],
)
def test_transforms_that_cannot_be_built(keys: dict, channels: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        train_transform(AugmentConfig(**keys), size=(8, 8), channels=channels)


def test_an_image_of_another_mode_is_refused() -> None:
    with pytest.raises(ValueError, match=r"an image has 1 channels of torch.uint8; wanted 3 of uint8"):
        eval_transform(AugmentConfig(), size=(8, 8))(picture(9, 9, "L"))


def test_contact_sheet(tmp_path: Path) -> None:
    """One row a sample, evaluation + views + views after the batch level; the same for the same seed."""
    config = AugmentConfig(policy="deit", mixup=0.8, cutmix=1.0, erasing=0.25)
    images = [picture(80, 60, seed=seed) for seed in range(3)]
    files = [contact_sheet(images, config, tmp_path / f"{n}.png", size=(32, 32), views=2, seed=5) for n in range(2)]
    first, second = (Image.open(file) for file in files)
    assert first.size == (4 + 5 * 36, 18 + 3 * 36)
    assert first.tobytes() == second.tobytes()
    shown = np.asarray(first)[18 : 18 + 32, 4 : 4 + 32]
    evaluated = eval_transform(config, size=(32, 32))(images[0]).permute(1, 2, 0).numpy()
    assert np.array_equal(shown, evaluated)
    with pytest.raises(ValueError, match=r"contact sheet: 0 images and views=4"):
        contact_sheet([], config, tmp_path / "none.png", size=(8, 8))


@pytest.mark.parametrize(
    "name",
    ["rand-m9-mstd0.5-inc1", "rand-m99-tweights", "augmix-m5-w4-d2-mstd0.5-b1-a1.5", "augmix", "original-mstd0.5",
     "originalr", "v0", "v0r-mstd1", "3a", "tv-rand-n2-m0", "tv-rand-n2-m30", "tv-trivial", "tv-auto-svhn"],
)  # fmt: skip
def test_every_policy_that_is_built_takes_images(name: str) -> None:
    operations = build_operations(name, (16, 16), (0.5,) * 3, "bicubic", 3)
    assert operations is not None
    for seed in range(30):
        torch.manual_seed(seed)
        operations(picture(16, 16))


@pytest.mark.parametrize("side", [(1, 20000), (20000, 1), (3, 4000), (640, 9)])
@pytest.mark.parametrize(
    "keys", [{"policy": "deit"}, {"policy": "flip_crop"}, {"crop": "simple"}, {"crop": "random"}, {}], ids=str
)
def test_of_an_image_with_extreme_sides_only_the_crop_is_resized(
    side: tuple[int, int], keys: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within two grey levels of making the whole, which took gigabytes; grey and many channels alike."""
    config, pixels = AugmentConfig(**(keys | {"flip": 0.0, "operations": ""})), picture(*side)
    tensor = torch.from_numpy(np.array(pixels)).permute(2, 0, 1)
    for build in (eval_transform, train_transform):
        transform, found = build(config, size=(16, 16), channels=3), {}
        for limit in (16, 10**9):
            monkeypatch.setattr(augment, "LARGE", limit)
            for image in (pixels, tensor):
                torch.manual_seed(3)
                found[limit, image is tensor] = transform(image).int()
        for kind in (False, True):
            assert (found[16, kind] - found[10**9, kind]).abs().max() <= 2


def test_an_image_of_one_row_takes_no_memory_to_speak_of() -> None:
    """65,000 x 1 pixels are 3.3 billion when they cover 224 x 224."""
    image = Image.fromarray(np.zeros((1, 65000, 3), np.uint8))
    for policy in ("deit", "flip_crop", "none"):
        for build in (eval_transform, train_transform):
            assert build(AugmentConfig(policy=policy), size=(224, 224))(image).shape == (3, 224, 224)
