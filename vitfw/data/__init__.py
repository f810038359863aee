"""Images to shards, shards to batches: index, order, decoding, augmentation, loaders."""
