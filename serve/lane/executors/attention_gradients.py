"""Attention over ``kernels`` with gradients, for training.

Gradients gather along the edges and along the edges in reverse, as those of sums do: the same bits
every time.
"""

from typing import Any, cast

import torch
from torch import Tensor

from serve.lane.executors import kernels
from serve.lane.executors.kernels import Csr, Score


def attend(
    graph: Csr, score: Score, left: Tensor, right: Tensor, value: Tensor, heads: int, *,
    scale: float, average: bool, att: Tensor | None = None, skip: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Run ``kernels.attend`` so that every tensor in it can have a gradient."""
    out = cast(
        "Tensor",
        _Attended.apply(left, right, value, att, graph, score, heads, scale, average),  # type: ignore[no-untyped-call]
    )
    if skip is not None:
        out = out + skip
    return out if bias is None else out + bias


def head_dots(x: Tensor, att: Tensor, heads: int) -> Tensor:
    """Run ``kernels.head_dots`` so that both tensors can have a gradient."""
    return cast("Tensor", _HeadDots.apply(x, att, heads))  # type: ignore[no-untyped-call]


class _Attended(torch.autograd.Function):
    """Attention over the slots of each node, which keeps the weights of the slots."""

    @staticmethod
    def forward(
        ctx: Any, left: Tensor, right: Tensor, value: Tensor, att: Tensor | None, graph: Csr,
        score: Score, heads: int, scale: float, average: bool,
    ) -> Tensor:  # fmt: skip
        flat = None if att is None else att.reshape(-1)
        out, alpha = kernels.attend_kept(
            graph, score, left, right, value, heads, scale=scale, average=average, att=flat
        )
        ctx.save_for_backward(left, right, value, att, alpha)
        ctx.graph, ctx.settings = graph, (score, heads, scale, average)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        left, right, value, att, alpha = ctx.saved_tensors
        score, heads, scale, average = ctx.settings
        gradient = gradients[0] / heads if average else gradients[0]
        flat = None if att is None else att.reshape(-1)
        of_left, of_right, of_value, of_att = kernels.attention_gradient(
            ctx.graph, score, left, right, value, alpha, heads, gradient.contiguous(),
            scale=scale, average=average, att=flat,
        )  # fmt: skip
        of_its_att = None if att is None else of_att.view(att.shape)
        return of_left, of_right, of_value, of_its_att, None, None, None, None, None


class _HeadDots(torch.autograd.Function):
    """Product of each head's features with its vector."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, att: Tensor, heads: int) -> Tensor:
        ctx.save_for_backward(x, att)
        return kernels.head_dots(x, att, heads)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        x, att = ctx.saved_tensors
        gradient = gradients[0]
        heads = gradient.shape[1]
        of_x = gradient.unsqueeze(2) * att.view(1, heads, -1)
        of_att = torch.einsum("nh,nhc->hc", gradient, x.view(len(x), heads, -1))
        return of_x.view(x.shape), of_att.reshape(att.shape), None
