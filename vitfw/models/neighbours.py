"""How well an image's nearest neighbours among the same images tell its class: needs no training and no second set."""

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

CHUNK = 1024  # queries compared with all features at once: 1024 x 50,000 similarities are 200 MB


class NeighbourAccuracy(Metric):
    """Leave-one-out: each labelled image is classified by the `k` others nearest to it (cosine similarity), whose votes
    weigh exp(similarity / temperature). Fewer than `k` others all vote. The result is a share; NaN without images."""

    full_state_update = False
    features: list[Tensor]
    labels: list[Tensor]

    def __init__(self, num_classes: int, *, k: int, temperature: float) -> None:
        super().__init__()
        self.num_classes, self.k, self.temperature = num_classes, k, temperature
        self.add_state("features", [], dist_reduce_fx="cat")
        self.add_state("labels", [], dist_reduce_fx="cat")

    def update(self, features: Tensor, labels: Tensor) -> None:
        """Features [B, D]; labels int64 [B], -1: the row does not count."""
        counted = labels >= 0
        self.features.append(torch.nn.functional.normalize(features.float(), dim=1)[counted])
        self.labels.append(labels[counted])

    def compute(self) -> Tensor:
        features, labels = dim_zero_cat(self.features), dim_zero_cat(self.labels)
        if len(features) < 2:
            return torch.tensor(float("nan"))
        hits = sum(self._hits(features, labels, start) for start in range(0, len(features), CHUNK))
        return torch.as_tensor(hits / len(features))

    def _hits(self, features: Tensor, labels: Tensor, start: int) -> int:
        queries = features[start : start + CHUNK]
        similarity = queries @ features.T
        rows = torch.arange(len(queries), device=features.device)
        similarity[rows, rows + start] = float("-inf")  # the image itself does not vote
        nearest = similarity.topk(min(self.k, len(features) - 1), dim=1)
        weights = (nearest.values / self.temperature).softmax(dim=1)
        votes = torch.zeros(len(queries), self.num_classes, device=features.device)
        votes.scatter_add_(1, labels[nearest.indices], weights)
        return int((votes.argmax(dim=1) == labels[start : start + CHUNK]).sum())
