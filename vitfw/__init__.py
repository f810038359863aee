"""vitfw: distributed training of Vision Transformers."""

from vitfw.versions import check_versions

__version__ = "0.1.0"

check_versions()  # an older torch or timm may lack a name, or mean another default by it: say so before anything runs
