"""What a run says while it runs and afterwards: metrics file, W&B, figures, page."""
