"""The replicas of several runs as one batched GPT, with a row for each replica.

Each row computes what it would compute alone, bit for bit: no operation mixes rows, and none sums
in an order that depends on the number of rows. A test compares rows with batches of one row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gpt.model import GPT, VOCABULARY, Shape

SHAPE = Shape(width=32, layers=2, heads=4, context=64)
"""A GPT of 35,136 parameters."""

ROWS = 8
"""Rows of a batch: more rows need more memory than fits into the caches, and are not faster."""


class GPTBatch:
    """The parameters and gradients of all rows, and their loss.

    Args:
        seeds: seed of the initial weights of each row.
        shape: size of the models.

    Attributes:
        models: a model for each row. Its parameters and gradients are views of the batch, so an
            optimizer of the model updates the batch.
        gradients: shape (rows, parameters of a model), float32.
    """

    def __init__(self, seeds: list[int], shape: Shape = SHAPE) -> None:
        self.shape = shape
        self.models = [GPT(shape, seed) for seed in seeds]
        first = dict(self.models[0].named_parameters())
        sizes = [parameter.numel() for parameter in first.values()]
        self.gradients = torch.zeros(len(seeds), sum(sizes))
        self._values = torch.empty_like(self.gradients)
        self._leaves: dict[str, Tensor] = {}
        self._targets: list[Tensor] = []
        begin = 0
        for (name, parameter), size in zip(first.items(), sizes, strict=True):
            values, gradients = (
                part[:, begin : begin + size].view(len(seeds), *parameter.shape)
                for part in (self._values, self.gradients)
            )
            for model, value, gradient in zip(self.models, values, gradients, strict=True):
                own = model.get_parameter(name)
                value.copy_(own.detach())
                own.data, own.grad = value, gradient
            self._leaves[name] = values.detach().requires_grad_()
            self._targets.append(gradients)
            begin += size

    def backward(self, text: Tensor) -> Tensor:
        """Set the gradients of the mean loss of each row.

        Args:
            text: int64, shape (rows, excerpts, length + 1).

        Returns:
            The mean loss of each row in nats per byte, shape (rows,).
        """
        losses = self._losses(self._leaves, text)
        count = losses.shape[1]
        weight = torch.full_like(losses, 1 / count)
        found = torch.autograd.grad(losses, list(self._leaves.values()), weight)
        for target, gradient in zip(self._targets, found, strict=True):
            target.copy_(gradient)
        return losses.detach().mean(1)

    @torch.no_grad()
    def evaluate(self, excerpts: Tensor, rows: list[int], at_once: int = 16) -> list[float]:
        """Return the mean loss of some rows over the same excerpts, in nats per byte.

        Args:
            excerpts: int64, shape (count, length + 1).
            rows: numbers of the rows.
            at_once: number of excerpts that are evaluated together.
        """
        leaves = {name: leaf[rows] for name, leaf in self._leaves.items()}
        total = torch.zeros(len(rows), dtype=torch.float64)
        for part in torch.split(excerpts, at_once):
            losses = self._losses(leaves, part.expand(len(rows), *part.shape))
            total += losses.double().sum(1)
        return [float(one) / (len(excerpts) * (excerpts.shape[1] - 1)) for one in total]

    def _losses(self, leaves: dict[str, Tensor], text: Tensor) -> Tensor:
        """Return the cross-entropy of each byte given those before it, (rows, excerpts * length).

        The same function as ``GPT.loss``, for each row its own parameters.
        """

        def linear(x: Tensor, name: str) -> Tensor:
            return torch.bmm(x, leaves[f"{name}.weight"].mT)

        def norm(x: Tensor, name: str) -> Tensor:
            weight, bias = leaves[f"{name}.weight"][:, None], leaves[f"{name}.bias"][:, None]
            return torch.addcmul(bias, functional.layer_norm(x, x.shape[-1:]), weight)

        shape = self.shape
        rows, excerpts, length = text.shape[0], text.shape[1], text.shape[2] - 1
        begins = VOCABULARY * torch.arange(rows)[:, None, None]
        embedded = functional.embedding(
            text[:, :, :-1] + begins, leaves["bytes.weight"].reshape(-1, shape.width)
        )
        x = embedded + leaves["places.weight"][:, None, :length]
        x = x.reshape(rows, excerpts * length, shape.width)
        for layer in range(shape.layers):
            block = f"blocks.{layer}."
            y = linear(norm(x, f"{block}attention_norm"), f"{block}queries_keys_values")
            parts = y.view(rows * excerpts, length, 3, shape.heads, -1).permute(2, 0, 3, 1, 4)
            query, key, value = parts.unbind()
            mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
            attended = mixed.transpose(1, 2).reshape(x.shape)
            x = x + linear(attended, f"{block}attended")
            y = linear(norm(x, f"{block}thought_norm"), f"{block}thought.0")
            x = x + linear(functional.gelu(y), f"{block}thought.2")
        logits = linear(norm(x, "norm"), "bytes")
        targets = text[:, :, 1:].reshape(-1)
        cross_entropy: Any = _CrossEntropy  # ``apply`` is without types
        losses: Tensor = cross_entropy.apply(logits.view(-1, VOCABULARY), targets)
        return losses.view(rows, -1)


class _CrossEntropy(torch.autograd.Function):
    """The cross-entropy of each row, with a gradient in place: a fifth less time for all."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        logarithms = torch.log_softmax(logits, -1)
        ctx.save_for_backward(logarithms, targets)
        return -logarithms.gather(-1, targets[:, None]).squeeze(-1)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        logarithms, targets = ctx.saved_tensors
        found = logarithms.exp_()
        found.scatter_add_(-1, targets[:, None], torch.full((len(targets), 1), -1.0))
        return found.mul_(gradients[0][:, None]), None
