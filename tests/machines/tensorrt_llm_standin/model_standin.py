"""What the stand-in serves instead of a model: nonsense, one byte a token, and a KV cache that is only counted."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

TOKENS_PER_BLOCK = 32
"""TensorRT-LLM's own where its file sets none."""
MEMORY_BYTES = 1 << 30
"""The memory of which a fraction is the KV cache: there is no GPU to ask."""
_LETTERS = "abcdefghijklmnopqrstuvwxyz "


class Refused(Exception):
    """A request that cannot be served; the message says why."""


class Model:
    """One model; every call may come from another thread."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        """Read the model's configuration.

        Raises:
            OSError, ValueError: when the folder holds none.
        """
        folder = Path(arguments["model"])
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self.name = folder.name
        self.longest: int = arguments["max_seq_len"] or config["max_position_embeddings"]
        self.seats = threading.Semaphore(arguments["max_batch_size"] or 8)
        cache = arguments["kv_cache_config"]
        head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        per_token = 2 * 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head
        room = int(MEMORY_BYTES * (cache.get("free_gpu_memory_fraction") or 0.9)) // per_token
        self.blocks = min(room, cache.get("max_tokens") or room) // TOKENS_PER_BLOCK
        self._counted = bool(arguments.get("enable_iter_perf_stats"))
        self._statistics: list[dict[str, Any]] = []
        self._lock = threading.Lock()

    def answer(self, prompt: str, tokens: int) -> Iterator[str]:
        """Yield the tokens of an answer.

        Raises:
            Refused: when prompt and answer are longer than a request may be.
        """
        if len(prompt.encode()) + tokens > self.longest:
            raise Refused(
                f"The sum of prompt length ({len(prompt.encode())}), query length and max_tokens ({tokens}) should not "
                f"exceed max_seq_len ({self.longest})"
            )
        start = sum(prompt.encode())
        return (_LETTERS[(start + 7 * number) % len(_LETTERS)] for number in range(tokens))

    def count(self, used: int) -> None:
        """Note an iteration of so many used tokens, where statistics are wanted."""
        if self._counted:
            taken = -(-used // TOKENS_PER_BLOCK)
            cache = {"maxNumBlocks": self.blocks, "tokensPerBlock": TOKENS_PER_BLOCK, "usedNumBlocks": taken}
            cache["freeNumBlocks"] = self.blocks - taken
            with self._lock:
                self._statistics.append({"iter": len(self._statistics), "kvCacheStats": cache, "numActiveRequests": 1})

    def statistics(self) -> list[dict[str, Any]]:
        """Return the iterations since it was asked last."""
        with self._lock:
            found, self._statistics = self._statistics, []
        return found
