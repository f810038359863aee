"""vitfw: distributed training of Vision Transformers."""

__version__ = "0.1.0"
