"""What a model is worth: exact metrics, probes, the ladder."""
