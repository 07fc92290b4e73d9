"""How the models of each family are built, as far as their config.json leaves it unsaid.

Read in the model classes of vLLM (vllm/model_executor/models) and transformers (src/transformers/models), whose class
defaults hold wherever a config.json lacks the key.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Family:
    """What the layers of one model type are made of; the defaults are those of Llama."""

    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    gated: bool = True
    """Feed-forward with a gate: three matrices, not two."""
    layer_norms: int = 2
    """Norms as wide as the model, per layer."""
    norm_bias: bool = False
    qk_norm: str = ""
    """Norms on queries and keys: `head` (one head wide), `full` (all heads wide)."""
    final_norm: bool = True
    tied: bool = False
    """The head is the embedding, where config.json does not say."""
    head_bias: bool = False
    learned_positions: int = -1
    """Rows of a learned position table beyond the context length; -1: there is none."""
    window: str = "all"
    """Which layers a `sliding_window` concerns without `layer_types`: all, upper (those from max_window_layers on, and
    only with use_sliding_window), others (all but every n-th, n from `pattern`), none."""
    pattern: int = 0
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Sizes that hold where config.json lacks them."""


FAMILIES: Mapping[str, Family] = {
    "llama": Family(window="none"),
    "mistral": Family(),
    "qwen2": Family(qkv_bias=True, window="upper"),
    "qwen3": Family(qk_norm="head", window="upper", defaults={"head_dim": 128}),
    "gemma": Family(tied=True, window="none", defaults={"head_dim": 256}),
    "gemma2": Family(
        tied=True, layer_norms=4, window="others", pattern=2, defaults={"head_dim": 256, "sliding_window": 4096}
    ),
    "phi3": Family(),
    "granite": Family(window="none"),
    "internlm2": Family(window="none"),
}

ARCHITECTURES: Mapping[str, str] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "GemmaForCausalLM": "gemma",
    "Gemma2ForCausalLM": "gemma2",
    "Phi3ForCausalLM": "phi3",
    "GraniteForCausalLM": "granite",
    "InternLM2ForCausalLM": "internlm2",
}
