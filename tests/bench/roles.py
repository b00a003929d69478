"""What a tensor is for, told by its name."""

from __future__ import annotations

import re

ROLES: tuple[tuple[str, str], ...] = (
    (r"adam|momentum|exp_avg", "optimiser state"),
    (r"norm|gamma|beta|moving_", "norm"),
    (r"scale$", "scale"),
    (r"bias$", "bias"),
    (r"embed|l2_|wte|wpe", "embedding"),
    (r"attention|attn|query|key|value", "attention"),
    (r"intermediate|output|ffn|mlp|linear_", "feed-forward"),
    (r"conv|cnn|kernel", "convolution"),
    (r"lstm|rnn|gru", "recurrent"),
)
"""Patterns of lower-case names, the first that matches counts."""


def role_of(tensor: str | None) -> str:
    """Return the role of a tensor, ``header`` for what is none."""
    if tensor is None:
        return "header, small"
    name = tensor.lower()
    return next((role for pattern, role in ROLES if re.search(pattern, name)), "other")
