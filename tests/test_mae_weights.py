"""Going on with masked autoencoding from a file: encoder and decoder in, what is not there said, what does not fit refused."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor

from vitfw import show
from vitfw.models.load_report import LoadConfig
from vitfw.models.model_config import ModelConfig
from vitfw.tasks.mae import MaeConfig, MaeTask, build_mae

GOLDENS = load_file(Path(__file__).parent / "goldens" / "mae_reference.safetensors")


def published(tag: str = "norm") -> dict[str, Tensor]:
    """The weights of the published code's tiny model, under its names."""
    start = f"{tag}.weight."
    return {name.removeprefix(start): value for name, value in GOLDENS.items() if name.startswith(start)}


def golden_task(*, model: dict | None = None, **options) -> MaeTask:
    """The model of the tag `norm`, with other, fresh weights."""
    torch.manual_seed(1)
    section: dict[str, Any] = {"variant": "mae_ti4", "image_size": 32, "width": 48, "depth": 2, "heads": 3}
    section |= model or {}
    decoder: dict[str, Any] = {"decoder_width": 32, "decoder_depth": 1, "decoder_heads": 2} | options
    return build_mae(MaeConfig(**decoder), ModelConfig(**section), num_classes=0)


def in_transformers_names(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """As ViTMAEForPreTraining of the transformers library stores it."""
    renamed = {}
    for name, value in state.items():
        start = "decoder." if name.startswith(("decoder_", "mask_token")) else "vit."
        name = re.sub(r"^decoder_blocks\.", "decoder_layers.", name)
        name = re.sub(r"^blocks\.", "encoder.layer.", name)
        name = re.sub(r"^norm\.", "layernorm.", name)
        name = re.sub(r"^(cls_token|patch_embed|pos_embed)", r"embeddings.\1", name)
        name = name.replace("patch_embed.proj", "patch_embeddings.projection")
        name = name.replace("embeddings.pos_embed", "embeddings.position_embeddings")
        for ours, theirs in {
            ".norm1.": ".layernorm_before.",
            ".norm2.": ".layernorm_after.",
            ".attn.proj.": ".attention.output.dense.",
            ".mlp.fc1.": ".intermediate.dense.",
            ".mlp.fc2.": ".output.dense.",
        }.items():
            name = name.replace(ours, theirs)
        if ".attn.qkv." in name:
            for part, piece in zip(("query", "key", "value"), value.chunk(3), strict=True):
                renamed[start + name.replace(".attn.qkv.", f".attention.attention.{part}.")] = piece.clone()
        else:
            renamed[start + name] = value
    return renamed


def wrapped(state: dict[str, Tensor], way: str) -> dict:
    if way == "entry":
        return {"model": state, "epoch": 799, "args": None}
    if way == "module":
        return {"model": {f"module.{name}": value for name, value in state.items()}}
    if way == "own names":
        task = golden_task()
        task.load_weights(_save(state, Path("published.pth")), LoadConfig())
        return dict(task.state_dict())
    return in_transformers_names(state) if way == "transformers" else state


def _save(state: dict, path: Path) -> str:
    torch.save(state, path)
    return str(path)


def golden_loss(task: MaeTask) -> Tensor:
    return task.eval().reconstruct(GOLDENS["norm.image"], GOLDENS["norm.noise"])[0].mean()


@pytest.mark.parametrize("way", ["plain", "entry", "module", "own names", "transformers"])
def test_encoder_and_decoder_from_one_file(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P05: the published loss comes out, and the report tells of both parts and of what the file leaves open."""
    monkeypatch.chdir(tmp_path)
    task = golden_task()
    report = task.load_weights(_save(wrapped(published(), way), tmp_path / "file.pth"), LoadConfig())
    torch.testing.assert_close(golden_loss(task), GOLDENS["norm.loss"][0], rtol=0, atol=1e-5)
    assert {*report.loaded} == {re.sub("^encoder.", "", name) for name in task.state_dict()}
    assert (report.dropped, report.outside, report.coverage) == ((), (), 1.0)
    text = report.text()
    assert "decoder: all 20 tensors loaded" in text
    assert "the file does not say task.decoder_heads=2 and task.normalise_target=true: taken to be so" in text


def test_an_encoder_alone_leaves_the_decoder_fresh_and_says_so(tmp_path: Path) -> None:
    encoder = {name: value for name, value in published().items() if not name.startswith(("decoder_", "mask_token"))}
    task, fresh = golden_task(), golden_task()
    report = task.load_weights(_save(encoder, tmp_path / "encoder.pth"), LoadConfig())
    assert "decoder: none in the file, it starts from its initialisation" in report.text()
    full = _save(published(), tmp_path / "full.pth")
    left_out = golden_task(decoder_width=64)  # of another size, which is no matter where the file's is left out
    assert (
        "decoder: left out as load.ignore says" in left_out.load_weights(full, LoadConfig(ignore=("decoder",))).text()
    )
    for name, value in fresh.decoder.state_dict().items():
        assert torch.equal(task.decoder.state_dict()[name], value), name
    for name, value in encoder.items():
        assert torch.equal(task.encoder.state_dict()[name], value), name
        assert torch.equal(left_out.encoder.state_dict()[name], value), name


@pytest.mark.parametrize(
    ("options", "model", "change", "text"),
    [
        (
            {"decoder_width": 64, "decoder_depth": 2},
            {},
            {},
            r"task.decoder_width is 32 in the file and 64 here; task.decoder_depth is 1 in the file and 2 here. "
            r"Set task.decoder_width=32 task.decoder_depth=1, or leave the file's decoder out with load.ignore=\[decoder",
        ),
        (
            {"decoder_mlp_ratio": 2.0},
            {},
            {},
            r"decoder_mlp_ratio is 4.0 in the file and 2.0 here. Set task.decoder_mlp",
        ),
        (
            {},
            {"in_channels": 1},
            {},
            r"the file's decoder predicts 48 values a patch, 16 are needed here .* set model.patch_size and model.in_ch",
        ),
        ({}, {}, {"decoder_pred.bias": None}, r"the file's decoder does not fit: 1 missing: pred.bias; leave it out"),
        ({}, {}, {"decoder_pred.extra": torch.zeros(1)}, r"does not fit: 1 unexpected: pred.extra"),
        ({}, {}, {"decoder_norm.weight": torch.full((32,), torch.nan)}, r"does not fit: 1 not finite: norm.weight"),
        ({}, {}, {"decoder_pos_embed": torch.ones(1, 65, 32)}, r"the rows of the 1 prefix tokens are not zero"),
        (
            {},
            {},
            {"decoder_pos_embed": torch.cat([torch.zeros(1, 1, 32), torch.ones(1, 64, 32)], 1)},
            r"the decoder's positions are learned",
        ),
        ({}, {}, {"mask_token": None}, r"the file's decoder has other names than those vitfw knows: "),
        ({}, {"width": 96}, {}, r"cls_token is \[1, 1, 48\] in the file and \[1, 1, 96\] here"),
    ],
    ids=["size", "mlp", "channels", "missing", "unexpected", "nan", "prefix", "learned", "names", "encoder"],
)
def test_what_does_not_fit_is_refused_and_nothing_is_copied(
    options: dict, model: dict, change: dict, text: str, tmp_path: Path
) -> None:
    state = {name: value for name, value in {**published(), **change}.items() if value is not None}
    task = golden_task(model=model, **options)
    before = {name: value.clone() for name, value in task.state_dict().items()}
    with pytest.raises(ValueError, match=text):
        task.load_weights(_save(state, tmp_path / "file.pth"), LoadConfig())
    assert all(torch.equal(value, before[name]) for name, value in task.state_dict().items())


def test_the_heads_of_the_published_decoders_are_known(tmp_path: Path) -> None:
    """No tensor shows them: with other heads the same weights would predict noise."""
    donor = golden_task(decoder_width=512, decoder_depth=8, decoder_heads=16)
    place = _save(dict(donor.state_dict()), tmp_path / "file.pth")
    text = r"task.decoder_heads is 16 in the file and 8 here. Set task.decoder_heads=16"
    with pytest.raises(ValueError, match=text):
        golden_task(decoder_width=512, decoder_depth=8, decoder_heads=8).load_weights(place, LoadConfig())
    other = golden_task(decoder_width=512, decoder_depth=8, decoder_heads=8)
    assert "all 104 tensors loaded" in other.load_weights(place, LoadConfig(differ=("decoder_heads",))).text()


def test_another_image_size_computes_positions_anew(tmp_path: Path) -> None:
    task = golden_task(model={"image_size": 16})
    table = task.decoder.pos_embed.clone()
    report = task.load_weights(_save(published(), tmp_path / "file.pth"), LoadConfig())
    assert "decoder: positions 8 x 8 -> 4 x 4, computed anew (sin-cos)" in report.text()
    assert torch.equal(task.decoder.pos_embed, table)
    torch.manual_seed(0)
    assert task.losses({"image": torch.randn(2, 3, 16, 16)}, 0.0)["loss"].isfinite()


def test_show_reads_published_files_of_any_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Sizes come from the tensors; heads, which no tensor shows, from the command."""
    place, out = _save({"model": published()}, tmp_path / "mae.pth"), tmp_path / "panel.png"
    Image.new("RGB", (60, 52), (200, 30, 60)).save(tmp_path / "picture.jpg")
    words = [place, str(tmp_path / "picture.jpg"), "-o", str(out), "--heads", "3", "--decoder-heads", "2"]
    assert show.show_reconstruct(words) == 0
    assert "1 images" in capsys.readouterr().out
    with Image.open(out) as panel:
        assert panel.size[0] >= 6 * 112
    task, _ = show.open_mae(place, heads=(3, 2))
    torch.testing.assert_close(golden_loss(task), GOLDENS["norm.loss"][0], rtol=0, atol=1e-5)
    assert not show.open_mae(place, heads=(3, 2), plain_target=True)[0].config.normalise_target
    with pytest.raises(
        ValueError, match=r"width 48 is none of the published ones .* no tensor shows its heads: give --"
    ):
        show.open_mae(place)
    with pytest.raises(ValueError, match=r"a decoder of 32 x 1 is not the published one .* give --decoder-heads"):
        show.open_mae(place, heads=(3, None))


def test_show_reads_a_folder_of_the_transformers_library(tmp_path: Path) -> None:
    save_file(
        {k: v.contiguous() for k, v in in_transformers_names(published()).items()}, tmp_path / "model.safetensors"
    )
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit_mae", "hidden_size": 48}))
    task, _ = show.open_mae(str(tmp_path), heads=(3, 2))
    torch.testing.assert_close(golden_loss(task), GOLDENS["norm.loss"][0], rtol=0, atol=1e-5)


def test_show_knows_the_published_sizes(tmp_path: Path) -> None:
    """A base encoder (one block of it) with the published decoder needs no word."""
    config = MaeConfig(decoder_width=512, decoder_depth=8, decoder_heads=16)
    task = build_mae(config, ModelConfig(variant="mae_b56", depth=1), num_classes=0)
    save_file(task.state_dict(), tmp_path / "mae.safetensors")
    opened, preprocessing = show.open_mae(str(tmp_path / "mae.safetensors"))
    assert (opened.encoder.arch.heads, opened.decoder.arch.heads, opened.encoder.arch.image) == (12, 16, (224, 224))
    assert preprocessing == show.IMAGENET
    assert all(torch.equal(value, task.state_dict()[name]) for name, value in opened.state_dict().items())


def test_show_refuses_what_cannot_reconstruct(tmp_path: Path) -> None:
    """P81."""
    encoder = {name: value for name, value in published().items() if not name.startswith(("decoder_", "mask"))}
    with pytest.raises(ValueError, match=r"encoder.pth: holds no decoder weights .* cannot reconstruct images"):
        show.open_mae(_save(encoder, tmp_path / "encoder.pth"))
    with pytest.raises(ValueError, match=r"no such checkpoint; give a run folder"):
        show.open_mae(str(tmp_path / "nothing.pth"))
