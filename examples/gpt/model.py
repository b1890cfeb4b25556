"""A small and plain GPT over bytes.

Decoder only: learned positions, pre-norm, causal attention, GELU, and one matrix for input and
output bytes (Radford et al. 2019, "Language Models are Unsupervised Multitask Learners").
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 256
"""Number of tokens. Every byte is a token, so the model needs no tokenizer."""

PROMPT = b"\ndef "


@dataclass(frozen=True, slots=True)
class Shape:
    """The size of a model.

    Attributes:
        width: numbers per byte between the layers; a multiple of ``heads``.
        layers: number of blocks.
        heads: number of attention heads in each block.
        context: largest number of bytes that the model sees.
    """

    width: int = 128
    layers: int = 4
    heads: int = 4
    context: int = 128

    def __post_init__(self) -> None:
        if min(self.width, self.layers, self.heads, self.context) < 1:
            raise ValueError(f"a model needs positive sizes, not {self}")
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not a multiple of {self.heads} heads")


class Block(nn.Module):
    """A transformer block: causal attention, then a feed-forward network for each byte."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.attention_norm = nn.LayerNorm(shape.width)
        self.queries_keys_values = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.attended = nn.Linear(shape.width, shape.width, bias=False)
        self.thought_norm = nn.LayerNorm(shape.width)
        self.thought = nn.Sequential(
            nn.Linear(shape.width, 4 * shape.width, bias=False),
            nn.GELU(),
            nn.Linear(4 * shape.width, shape.width, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the output for ``x``, of the same shape: (batch, length, width)."""
        x = x + self.attend(self.attention_norm(x))
        thought: Tensor = self.thought(self.thought_norm(x))
        return x + thought

    def attend(self, x: Tensor) -> Tensor:
        """Return the causal attention of ``x``, shape (batch, length, width)."""
        batch, length, width = x.shape
        parts: Tensor = self.queries_keys_values(x)
        q, k, v = parts.view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.attended(mixed.transpose(1, 2).reshape(batch, length, width))
        return out


class GPT(nn.Module):
    """A model that predicts the next byte at each place of a text.

    Args:
        shape: size of the model.
        seed: seed of the initial weights, which depend on ``seed`` and ``shape`` only.
    """

    def __init__(self, shape: Shape, seed: int = 0) -> None:
        super().__init__()
        self.shape = shape
        self.bytes = nn.Embedding(VOCABULARY, shape.width)
        self.places = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.Sequential(*(Block(shape) for _ in range(shape.layers)))
        self.norm = nn.LayerNorm(shape.width)
        self._draw(torch.Generator().manual_seed(seed))

    def _draw(self, generator: torch.Generator) -> None:
        """Draw the initial weights. Those that add to the residual stream shrink with the depth."""
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                continue  # the norms keep their initial values
            is_added = name.endswith(("attended.weight", "thought.2.weight"))
            scale = 0.02 / math.sqrt(2 * self.shape.layers) if is_added else 0.02
            with torch.no_grad():
                parameter.normal_(0.0, scale, generator=generator)

    def forward(self, text: Tensor) -> Tensor:
        """Return the logits of the next byte at each place.

        Args:
            text: int64, shape (batch, length), length up to ``shape.context``.

        Returns:
            float32, shape (batch, length, 256).
        """
        places = torch.arange(text.shape[1], device=text.device)
        x: Tensor = self.bytes(text) + self.places(places)
        x = self.norm(self.blocks(x))
        return functional.linear(x, self.bytes.weight)  # tied: one matrix for input and output

    def loss(self, text: Tensor) -> Tensor:
        """Return the mean cross-entropy of each byte given the bytes before it, in nats.

        Args:
            text: int64, shape (batch, length + 1).
        """
        logits: Tensor = self(text[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())

    @torch.no_grad()
    def write(self, count: int, *, prompt: bytes = PROMPT, heat: float = 0.8, seed: int = 0) -> str:
        """Let the model write text.

        Args:
            count: number of bytes to write.
            prompt: bytes before the new text; at least one.
            heat: temperature, which divides the logits; likely bytes become likelier below 1.
            seed: seed of the draw.

        Returns:
            The prompt and the new text. Bytes that are not UTF-8 become replacement characters.
        """
        generator = torch.Generator().manual_seed(seed)
        text = torch.tensor(list(prompt))[None]
        for _ in range(count):
            logits: Tensor = self(text[:, -self.shape.context :])[0, -1]
            byte = torch.multinomial(torch.softmax(logits / heat, 0), 1, generator=generator)
            text = torch.cat((text, byte[None]), dim=1)
        return text[0].to(torch.uint8).numpy().tobytes().decode(errors="replace")


def digest(tensors: Iterable[Tensor]) -> str:
    """Return 16 hex digits of a hash over all bits of the tensors."""
    hashed = hashlib.sha256()
    for tensor in tensors:
        hashed.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()[:16]
