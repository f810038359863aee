"""The one configurable ViT, its named variants, weights in and out, and its costs."""
