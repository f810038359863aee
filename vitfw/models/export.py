"""Weights out: a folder that timm and Hugging Face load, and ONNX checked against the model it came from."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from vitfw.models.build import TimmModel, build_model
from vitfw.models.load_report import LoadConfig
from vitfw.models.preprocess import Preprocessing
from vitfw.models.reading import NETWORKS, Source, Which, model_section, read
from vitfw.models.timm_bridge import timm_arguments, to_timm
from vitfw.models.vit import ViT
from vitfw.models.weights import load

Format = Literal["timm", "vitfw"]


@dataclass(frozen=True)
class Exported:
    """Where an export lies, which weights it holds (entry of the checkpoint), and the ONNX file's largest
    difference.
    """

    folder: Path
    entry: str
    onnx_difference: float | None = None


def export_checkpoint(
    place: str | Path,
    folder: str | Path,
    *,
    which: Which = "auto",
    format: Format = "timm",  # noqa: A002 - the word users know
    onnx: bool = False,
    preprocessing: Preprocessing | None = None,
) -> Exported:
    """A checkpoint (or anything `reading.read` knows that names its network) -> a folder, and model.onnx in it if
    asked.

    which: raw or averaged weights. preprocessing: what the images went through, where the file does not say itself.
    """
    source = read(place, which=which)
    model, classes = build_for(source)
    load(model, place, LoadConfig(which=which, head="keep" if classes else "auto"))
    told = preprocessing or source.preprocessing
    path = export(model, folder, preprocessing=told, format=format)
    difference = export_onnx(model, path / "model.onnx", preprocessing=told) if onnx else None
    return Exported(path, source.entry, difference)


def build_for(source: Source) -> tuple[nn.Module, int]:
    """The network a source describes, and its number of classes, read off the head's tensor."""
    heads = [value.shape[0] for name, value in source.state.items() if _is_head(name, own=source.own)]
    if source.architecture is not None:
        classes = heads[0] if heads else 0
        return ViT(source.architecture, classes).eval(), classes
    section = model_section(source.place) if source.own else None
    if section is None:
        raise ValueError(
            f"weights={source.place}: the file does not say which network it holds; export a checkpoint of vitfw"
        )
    with torch.device("meta"):
        classifier = build_model(section, num_classes=1).net.default_cfg["classifier"]  # type: ignore[union-attr,index]
    names = [f"{network}net.{classifier}.weight" for network in NETWORKS]
    heads = [source.state[name].shape[0] for name in names if name in source.state]
    classes = heads[0] if heads else 0
    return build_model(section, num_classes=classes).eval(), classes


def _is_head(name: str, *, own: bool) -> bool:
    """In a checkpoint of vitfw other parts of a task may have heads too: only the network's counts."""
    if own:
        return name in [f"{network}head.weight" for network in NETWORKS]
    return name in ("head.weight", "classifier.weight") or name.endswith((".head.weight", ".classifier.weight"))


def export(
    model: nn.Module,
    folder: str | Path,
    *,
    preprocessing: Preprocessing | None = None,
    format: Format = "timm",  # noqa: A002 - the word users know
) -> Path:
    """Writes model.safetensors and config.json.

    Format "timm": names, entry point and arguments of timm, so that `timm.create_model("local-dir:FOLDER",
    pretrained=True)` gives the same logits. Format "vitfw": our names, for networks timm has not. Both say the
    architecture and preprocessing. Raises ValueError naming the key, where timm has no such network.
    """
    from safetensors.torch import save_file

    if isinstance(model, TimmModel):
        return _export_timm(model, Path(folder), preprocessing)
    if not isinstance(model, ViT):
        raise ValueError(f"export: a {type(model).__name__} is neither a ViT nor a TimmModel")
    arch, state = model.arch, {name: value.detach() for name, value in model.state_dict().items()}
    config: dict[str, Any] = {}
    if format == "timm":
        try:
            entry, arguments = timm_arguments(arch)
        except ValueError as error:
            raise ValueError(f"{error}; format=vitfw exports it for vitfw itself") from None
        state = to_timm(state, arch)
        config = _timm_config(entry, arguments, model.num_classes, preprocessing)
    told = {
        "architecture": dataclasses.asdict(arch),
        "preprocessing": preprocessing.plain() if preprocessing else None,
        "num_classes": model.num_classes,
    }
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    tensors = {name: value.cpu().contiguous() for name, value in state.items()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt", "vitfw": json.dumps(told)})
    (path / "config.json").write_text(json.dumps({**config, "vitfw": told}, indent=2) + "\n")
    return path


def _timm_config(
    entry: str, arguments: dict[str, Any], classes: int, preprocessing: Preprocessing | None
) -> dict[str, Any]:
    height, width = arguments["img_size"]
    pretrained: dict[str, Any] = {
        "input_size": [arguments["in_chans"], height, width],
        "num_classes": classes,
        "first_conv": "patch_embed.proj",
        "classifier": ["head", "head_dist"] if entry.startswith("deit") else "head",
    }
    if preprocessing is not None:
        pretrained |= preprocessing.timm_config(classes)
    pools = {"global_pool": arguments["global_pool"], "num_classes": classes, "num_features": arguments["embed_dim"]}
    return {"architecture": entry, **pools, "model_args": arguments, "pretrained_cfg": pretrained}


def _export_timm(model: TimmModel, path: Path, preprocessing: Preprocessing | None) -> Path:
    from timm.models import save_for_hf

    net: Any = model.net
    config = preprocessing.timm_config(model.num_classes) if preprocessing else None
    arguments: dict[str, Any] = {"num_classes": model.num_classes, "in_chans": _channels(net)}
    if hasattr(net, "patch_embed") and hasattr(net.patch_embed, "img_size"):
        arguments["img_size"] = model.image
    names = {"label_names": list(preprocessing.class_names)} if preprocessing and preprocessing.class_names else None
    save_for_hf(net, str(path), data_config=config, model_config=names, model_args=arguments, safe_serialization=True)
    return path


def _channels(net: nn.Module) -> int:
    return next(m.in_channels for m in net.modules() if isinstance(m, nn.Conv2d))


class _ImagesToLogits(nn.Module):
    """One tensor in, one tensor out: what ONNX can hold."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        return self.model(images)


def export_onnx(
    model: nn.Module,
    path: str | Path,
    *,
    preprocessing: Preprocessing | None = None,
    tolerance: float = 1e-4,
) -> float:
    """Writes an ONNX file with a free batch size and compares it with the model through onnxruntime; the largest
    difference.

    Inputs are float32 images [B, C, H, W], normalised as the weights want; the preprocessing stands in the file's
    metadata. Raises ValueError where the packages are missing or the two differ by more than `tolerance` (relative to
    the largest logit).
    """
    try:
        import onnx
        import onnxruntime
        import onnxscript  # noqa: F401 - torch's exporter needs it and says so only late
    except ImportError as error:
        raise ValueError(f"export to ONNX needs the package {error.name}: pip install 'vitfw[onnx]'") from error
    wrapped = _ImagesToLogits(model.float().cpu()).eval()
    shape = _input_shape(model)
    images = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))
    program = torch.onnx.export(
        wrapped, (images,), dynamo=True, verbose=False, dynamic_shapes=({0: torch.export.Dim("batch", min=1)},)
    )
    assert program is not None
    program.save(str(path))
    if preprocessing is not None:
        file = onnx.load(str(path))
        onnx.helper.set_model_props(file, {"preprocessing": json.dumps(preprocessing.plain())})
        onnx.save(file, str(path))
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    largest = 0.0
    for batch in (images, torch.randn(3, *shape, generator=torch.Generator().manual_seed(1))):
        with torch.no_grad():
            expected = wrapped(batch)
        (got,) = session.run(None, {session.get_inputs()[0].name: batch.numpy()})
        scale = max(float(expected.abs().max()), 1.0)
        largest = max(largest, float((torch.from_numpy(got) - expected).abs().max()) / scale)
    if not largest <= tolerance:
        raise ValueError(
            f"export to ONNX: {path} differs from the model by {largest:.2g}, more than {tolerance:.2g} allowed"
        )
    return largest


def _input_shape(model: nn.Module) -> tuple[int, int, int]:
    if isinstance(model, ViT):
        return model.in_channels, *model.arch.image
    assert isinstance(model, TimmModel)
    return _channels(model.net), *model.image
