"""Decoding and augmentation of one sample: channels, orientation, damage, and pixels that depend on the draw."""

import io
import random

import numpy as np
import pytest
import torch
from make_shards import make_folder, make_shards, noisy, picture, to_uint8, write_tar
from PIL import Image, ImageFile

from vitfw.data.augment import AugmentConfig, eval_transform, train_transform
from vitfw.data.dataset import ImageDataset
from vitfw.data.decode import UndecodableError, decode
from vitfw.data.index import open_samples
from vitfw.data.order import Draw
from vitfw.data.part import read_part
from vitfw.data.policies import POLICIES


def encoded(image: Image.Image, image_format: str, **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, image_format, **options)
    return buffer.getvalue()


def pixels(image) -> np.ndarray:
    assert isinstance(image, Image.Image)
    return np.asarray(image)


def opened(data: bytes, **options) -> Image.Image:
    image = decode(data, **options)
    assert isinstance(image, Image.Image)
    return image


def upright() -> Image.Image:
    """10 wide, 20 high, with a red top edge and one blue corner."""
    image = Image.new("RGB", (10, 20), (0, 200, 0))
    image.paste((255, 0, 0), (0, 0, 10, 5))
    image.paste((0, 0, 255), (0, 0, 3, 3))
    return image


STORED = {  # how a camera stores the upright picture under each orientation tag
    1: None,
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("image_format", ["PNG", "WEBP", "JPEG"])
def test_exif__p72_every_orientation_gives_the_upright_picture(orientation, image_format):
    stored = upright() if STORED[orientation] is None else upright().transpose(STORED[orientation])
    exif = Image.Exif()
    exif[0x0112] = orientation
    lossless = {"PNG": {}, "WEBP": {"lossless": True}, "JPEG": {"quality": 95, "subsampling": 0}}[image_format]
    data = encoded(stored, image_format, exif=exif, **lossless)
    image = decode(data)
    assert image.size == (10, 20)
    error = np.abs(pixels(image).astype(int) - pixels(upright()).astype(int))
    assert error.max() <= (60 if image_format == "JPEG" else 0)
    assert error.mean() < 3
    assert decode(data, exif=False).size == stored.size


def test_exif__broken_block_is_no_damage():
    data = encoded(upright(), "JPEG", exif=b"Exif\0\0MM\0*\0\0\0\x08\xff\xff broken")
    assert decode(data).size == (10, 20)


def test_modes__p73_everything_becomes_rgb_or_grey():
    base = Image.fromarray(np.random.default_rng(0).integers(0, 256, (20, 30, 3), np.uint8))
    palette = base.quantize(16)
    cases = {mode: (base.convert(mode), "PNG") for mode in ("1", "L", "LA", "RGBA")}
    cases |= {"P": (palette, "PNG"), "CMYK": (base.convert("CMYK"), "JPEG"), "YCbCr": (base.convert("YCbCr"), "JPEG")}
    cases |= {"I": (base.convert("L").convert("I"), "TIFF"), "F": (base.convert("L").convert("F"), "TIFF")}
    cases |= {"GIF": (palette, "GIF"), "WEBP": (base, "WEBP"), "BMP": (base, "BMP"), "PPM": (base, "PPM")}
    for name, (image, image_format) in cases.items():
        data = encoded(image, image_format)
        assert decode(data).mode == "RGB" and decode(data).size == (30, 20), name
        assert decode(data, channels=1).mode == "L", name
    transparent = encoded(palette, "PNG", transparency=0)
    assert np.all(pixels(decode(transparent, background=(1, 2, 3)))[np.asarray(palette) == 0] == (1, 2, 3))


def test_modes__alpha_on_the_background_cmyk_red_16_bits():
    clear = encoded(Image.new("RGBA", (4, 4), (10, 20, 30, 0)), "PNG")
    assert np.all(pixels(decode(clear)) == 255)
    assert np.all(pixels(decode(clear, background=(7, 8, 9))) == (7, 8, 9))
    assert decode(clear, channels=4).getpixel((0, 0)) == (10, 20, 30, 0)
    cmyk = encoded(Image.new("CMYK", (16, 16), (0, 255, 255, 0)), "JPEG")
    assert np.abs(pixels(decode(cmyk)).astype(int) - (255, 0, 0)).max() <= 3
    deep = Image.fromarray(np.array([[0, 257 * 100, 65535]], np.uint16))
    assert list(pixels(decode(encoded(deep, "PNG"), channels=1))[0]) == [0, 100, 255]


def test_channels__many_from_npy_without_running_code():
    array = np.random.default_rng(0).integers(0, 256, (6, 5, 13), np.uint8)
    buffer = io.BytesIO()
    np.save(buffer, array)
    tensor = decode(buffer.getvalue(), channels=13)
    assert isinstance(tensor, torch.Tensor) and np.array_equal(tensor.permute(1, 2, 0).numpy(), array)
    with pytest.raises(UndecodableError, match=r"uint8 \(6, 5, 13\), wanted uint8 \[H, W, 3\]"):
        decode(buffer.getvalue())
    with pytest.raises(UndecodableError, match=r"model\.channels=13 needs \.npy"):
        decode(picture(0), channels=13)
    pickled = io.BytesIO()
    np.save(pickled, np.array([print], dtype=object), allow_pickle=True)
    with pytest.raises(UndecodableError, match=r"damaged \.npy"):
        decode(pickled.getvalue())


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("policy", list(POLICIES))
def test_npy__goes_through_every_policy_as_a_png_does(policy: str, channels: int):
    array = np.random.default_rng(0).integers(0, 256, (20, 24, channels), np.uint8)
    buffer = io.BytesIO()
    np.save(buffer, array)
    statistics = {"mean": (0.5,) * channels, "std": (0.5,) * channels}
    config = AugmentConfig(policy=policy, **statistics)  # type: ignore[arg-type]
    for build in (train_transform, eval_transform):
        transform, found = build(config, size=(16, 16), channels=channels), []
        for data in (buffer.getvalue(), encoded(Image.fromarray(array.squeeze()), "PNG")):
            random.seed(0)
            np.random.seed(0)
            torch.manual_seed(0)
            found.append(transform(decode(data, channels=channels)))
        assert torch.equal(*found)


@pytest.mark.parametrize("image_format", ["PNG", "JPEG", "WEBP"])
def test_damage__p30_is_an_error_and_never_grey(image_format):
    data = encoded(Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)), image_format)
    for damaged in (data[: len(data) // 2], b"", b"not an image", data[:40]):
        with pytest.raises((UndecodableError, OSError)):
            image = decode(damaged)
            assert isinstance(image, Image.Image)
            image.load()
    assert ImageFile.LOAD_TRUNCATED_IMAGES is False


def large_jpeg(size=(1600, 1200)) -> bytes:
    """Smooth colour noise."""
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (24, 32, 3), np.uint8))
    return encoded(noise.resize(size, Image.Resampling.BICUBIC), "JPEG", quality=92)


@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
def test_read_part__close_to_pillow_and_decoded_at_the_scale_that_suffices(interpolation):
    data = large_jpeg()
    plain = opened(data)
    boxes = (((100, 200, 900, 1000), 4), ((3, 5, 400, 500), 2), ((0, 0, 150, 150), 1), ((1100, 1500, 100, 100), 1))
    for box, scale in boxes:
        image = opened(data)
        part = read_part(image, box, (96, 80), interpolation)
        assert part.dtype == torch.uint8 and part.shape == (3, 96, 80)
        assert abs(image.width - 1600 / scale) <= 1
        top, left, height, width = box
        cut = plain.crop((left, top, left + width, top + height))
        wanted = cut.resize((80, 96), getattr(Image.Resampling, interpolation.upper()))
        error = np.abs(part.permute(1, 2, 0).numpy().astype(int) - pixels(wanted))
        assert error.mean() < (3 if scale > 1 else 0.02)
        assert scale > 1 or error.max() <= 1


def test_read_part__grey_png_and_damaged():
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64), np.uint8))
    grey = encoded(noise, "JPEG")
    assert read_part(opened(grey, channels=1), (0, 0, 60, 60), (8, 8), "bicubic").shape == (1, 8, 8)  # at 1/2
    assert read_part(opened(grey, channels=1), (0, 0, 9, 9), (8, 8), "bicubic").shape == (1, 8, 8)
    same = read_part(opened(encoded(noise, "PNG")), (4, 8, 8, 8), (8, 8), "bicubic")
    assert np.array_equal(same[0].numpy(), np.asarray(noise)[4:12, 8:16])
    with pytest.raises(OSError, match="truncated"):
        read_part(opened(grey[: len(grey) // 2], channels=1), (0, 0, 9, 9), (8, 8), "bicubic")


@pytest.mark.parametrize("policy", ["mae", "deit", "flip_crop"])
def test_region_transform__as_the_whole_transform(tmp_path, policy):
    members = [("a.jpg", large_jpeg((120, 90))), ("b.jpg", large_jpeg()), ("c.jpg", large_jpeg()[:20000])]
    write_tar(tmp_path / "s.tar", members)
    transform = train_transform(AugmentConfig(policy=policy), size=(64, 64))
    fast = ImageDataset(open_samples(f"{tmp_path}/s.tar"), transform, seed=0)
    plain = ImageDataset(fast.samples, lambda image: transform(image), seed=0)  # without box and finish
    assert fast._region is not None and plain._region is None
    for row, limit in ((0, 0.3), (1, 8)):  # a policy may magnify the small difference of the large one, read at 1/4
        for epoch in range(6):
            pair = [dataset[Draw(epoch, row, 0)]["image"].int() for dataset in (fast, plain)]
            assert (pair[0] - pair[1]).abs().float().mean() < limit
    with pytest.raises(UndecodableError, match=r"s\.tar: c"):
        fast[Draw(0, 2, 0)]


def test_seeds__p20_p33_p34_a_function_of_the_draw(tmp_path):
    dataset = ImageDataset(open_samples(make_shards(tmp_path, [4])), noisy, seed=0)
    draws = [Draw(epoch, index, repeat) for epoch in range(3) for index in range(4) for repeat in range(2)]
    first = [dataset[draw]["image"] for draw in draws]
    random.seed(5)
    again = [dataset[draw]["image"] for draw in reversed(draws)][::-1]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    for part in (lambda image: tuple(image[0, 1].tolist()), lambda image: (int(image[0, 0, 0]), int(image[0, 0, 1]))):
        assert len({part(image) for image in first}) >= len(draws) - 1
    other = ImageDataset(dataset.samples, noisy, seed=1)
    assert not torch.equal(other[draws[0]]["image"], first[0])


def test_seeds__main_process_streams_are_left_alone(tmp_path):
    dataset = ImageDataset(open_samples(make_shards(tmp_path, [1])), noisy, seed=0)
    torch.manual_seed(3)
    np.random.seed(3)
    random.seed(3)
    wanted = torch.rand(2), np.random.rand(), random.random()
    torch.manual_seed(3)
    np.random.seed(3)
    random.seed(3)
    dataset[Draw(0, 0, 0)]
    assert torch.equal(torch.rand(2), wanted[0]) and np.random.rand() == wanted[1] and random.random() == wanted[2]


def test_bad_samples__p30_raise_skip_and_padding(tmp_path):
    samples = open_samples(make_shards(tmp_path, [6], size=32, bad=(2,)))
    with pytest.raises(UndecodableError, match=r"s00\.tar: 002: OSError"):
        ImageDataset(samples, noisy, seed=0)[Draw(0, 2, 0)]
    skipping = ImageDataset(samples, noisy, seed=0, on_bad_sample="skip")
    sample = skipping[Draw(0, 2, 0)]
    assert sample["index"] != 2 and sample["label"] == samples.label(sample["index"])
    assert [row for row, _ in sample["bad"]] == [2] and "s00.tar: 002" in sample["bad"][0][1]
    assert skipping[Draw(0, 2, 0)]["index"] == sample["index"]
    evaluating = ImageDataset(samples, to_uint8, seed=0, on_bad_sample="skip", replace=False)
    padded = evaluating[Draw(0, 2, 0)]
    assert padded["label"] == padded["index"] == -1 and padded["image"].shape == (3, 64, 64)
    nothing = open_samples(make_shards(tmp_path, [2], bad=(0, 1)))
    with pytest.raises(UndecodableError, match="16 images in a row"):
        ImageDataset(nothing, noisy, seed=0, on_bad_sample="skip")[Draw(0, 0, 0)]


def test_padding__is_zero_with_label_minus_one(tmp_path):
    samples = open_samples(make_folder(tmp_path / "f", {"a": 1, "b": 1}))
    dataset = ImageDataset(samples, noisy, seed=0)
    padded = dataset[Draw(0, -1, 0)]
    assert padded["image"].shape == (3, 8, 8) and not padded["image"].any()
    assert padded["label"] == padded["index"] == -1
    folder, shard = (
        dataset[Draw(0, 1, 0)],
        ImageDataset(open_samples(make_shards(tmp_path, [2])), noisy, seed=0)[Draw(0, 1, 0)],
    )
    assert torch.equal(folder["image"], shard["image"])  # one path for folders and shards


def test_errors__of_the_store_and_of_the_transform_are_not_excused(tmp_path):
    samples = open_samples(make_folder(tmp_path, {"a": 1}))
    dataset = ImageDataset(samples, lambda image: image, seed=0, on_bad_sample="skip")  # type: ignore[arg-type,return-value]
    with pytest.raises(TypeError, match="uint8 tensor"):
        dataset[Draw(0, 0, 0)]
    (tmp_path / "a/000.png").unlink()
    with pytest.raises(FileNotFoundError):
        dataset[Draw(0, 0, 0)]
