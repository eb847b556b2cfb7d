"""Models of the zoo, written as a repository holds them."""

import torch

from serve.models import zoo
from serve.models.repository import find
from serve.models.writer import write_model


def written_gcn(root, args):
    """Write a GCN, always with the same weights, and return its specification."""
    torch.manual_seed(0)
    write_model(root, "gcn", zoo.gcn(**args), factory="serve.models.zoo:gcn", args=args)
    return find(root, "gcn")
