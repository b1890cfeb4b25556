"""A small GPT over bytes, as plain as it gets.

Decoder only: learned positions, pre-norm, causal attention, GELU, and one matrix for reading and
writing bytes (Radford et al. 2019, "Language Models are Unsupervised Multitask Learners").
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
"""Every byte is a token: there is no tokenizer to train, to ship or to disagree about."""

PROMPT = b"\ndef "


@dataclass(frozen=True, slots=True)
class Shape:
    """How large a model is.

    Attributes:
        width: numbers per byte between the layers; a multiple of ``heads``.
        layers: how many blocks there are.
        heads: of the attention in each block.
        context: how many bytes the model sees at most.
    """

    width: int = 128
    layers: int = 4
    heads: int = 4
    context: int = 128

    def __post_init__(self) -> None:
        if min(self.width, self.layers, self.heads, self.context) < 1:
            raise ValueError(f"a model needs positive sizes, not {self}")
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is no multiple of {self.heads} heads")


class Block(nn.Module):
    """Each byte looks at those before it, then thinks for itself."""

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
        """Shape (batch, length, width) in and out."""
        x = x + self.attend(self.attention_norm(x))
        thought: Tensor = self.thought(self.thought_norm(x))
        return x + thought

    def attend(self, x: Tensor) -> Tensor:
        """Mix in what stands before each place."""
        batch, length, width = x.shape
        parts: Tensor = self.queries_keys_values(x)
        q, k, v = parts.view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.attended(mixed.transpose(1, 2).reshape(batch, length, width))
        return out


class GPT(nn.Module):
    """Says of each byte of a text which one comes next.

    Args:
        shape: how large it is.
        seed: of the initial weights; the same seed gives the same weights, whatever was drawn
            before.
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
        """Initial weights. What adds to the residual stream is smaller the more of them add."""
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                continue  # the norms begin as they are
            is_added = name.endswith(("attended.weight", "thought.2.weight"))
            scale = 0.02 / math.sqrt(2 * self.shape.layers) if is_added else 0.02
            with torch.no_grad():
                parameter.normal_(0.0, scale, generator=generator)

    def forward(self, text: Tensor) -> Tensor:
        """Logits of the next byte at each place.

        Args:
            text: int64, shape (batch, length), length up to ``shape.context``.

        Returns:
            float32, shape (batch, length, 256).
        """
        places = torch.arange(text.shape[1], device=text.device)
        x: Tensor = self.bytes(text) + self.places(places)
        x = self.norm(self.blocks(x))
        return functional.linear(x, self.bytes.weight)  # tied: what reads bytes also writes them

    def loss(self, text: Tensor) -> Tensor:
        """Mean cross-entropy of each byte given those before it, in nats.

        Args:
            text: int64, shape (batch, length + 1).
        """
        logits: Tensor = self(text[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())

    @torch.no_grad()
    def write(self, count: int, *, prompt: bytes = PROMPT, heat: float = 0.8, seed: int = 0) -> str:
        """Let the model write.

        Args:
            count: how many bytes.
            prompt: what they follow; at least one byte.
            heat: divides the logits; below 1 it keeps to what it is surer of.
            seed: of the draw.

        Returns:
            The prompt and what follows it; what is no UTF-8 is shown as such.
        """
        generator = torch.Generator().manual_seed(seed)
        text = torch.tensor(list(prompt))[None]
        for _ in range(count):
            logits: Tensor = self(text[:, -self.shape.context :])[0, -1]
            byte = torch.multinomial(torch.softmax(logits / heat, 0), 1, generator=generator)
            text = torch.cat((text, byte[None]), dim=1)
        return text[0].to(torch.uint8).numpy().tobytes().decode(errors="replace")


def digest(tensors: Iterable[Tensor]) -> str:
    """16 hex digits that differ if a single bit of the tensors does."""
    hashed = hashlib.sha256()
    for tensor in tensors:
        hashed.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()[:16]
