"""What a model is asked for as proof, and what counts as an answer.

A model that answers rubbish answers all the same: with logits that are not numbers an engine gives token 0 again and
again ("!" in many vocabularies), or nothing, with HTTP 200. So the answer must name the right model and hold text of
more than one token, or numbers that are finite. Nothing is asked of its sense: a model of the simulation has random
weights. Text is sampled, because such a model repeats itself where the likeliest token is always taken.

The forms follow vllm/entrypoints (0.8.5 to 0.33.0), sglang/srt/entrypoints/openai (0.5.10.post1, 0.5.23) and
tensorrt_llm/serve/openai_protocol.py (1.0.0).
"""

from __future__ import annotations

import base64
import json
import math
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuready.serving import launch
from gpuready.serving.files import read_json

TOKENS = 16
ENOUGH_TO_JUDGE = 8
"""Tokens from which on one and the same is no chance any more."""
WORDS = "Once upon a time, there was"
"""No model ends its answer here, whatever it is made for."""
QUERY = "What is the capital of France?"
DOCUMENTS = ("Paris is the capital of France.", "Bread is baked in an oven.")
IMAGE_PIXELS = 64


@dataclass(frozen=True)
class Asked:
    """Whom to ask, and for what."""

    port: int
    model: str
    """The name under which it is served."""
    task: str = "generate"
    address: str = "127.0.0.1"
    engine: str = "vllm"
    vision: bool = False
    """Whether it must take an image, too."""
    dimensions: int | None = None
    """How long an embedding is; None where it is not known."""


@dataclass(frozen=True)
class Probe:
    """One question, and what its answer lacks."""

    path: str
    body: Mapping[str, Any]
    lacks: Callable[[Any], str]
    """From an answer to what it lacks, as "a token"; nothing where it is good."""


def asked_of(plan: Mapping[str, Any], part: Mapping[str, Any]) -> Asked:
    """Return what a replica is asked for, by the plan of its deployment and its own part of it."""
    engine, task = str(plan.get("engine", "vllm")), str(plan.get("task", "generate"))
    config = read_json(Path(str(plan.get("model_path", ""))) / "config.json") or {}
    name = launch.served_name({**plan, "engine": engine})
    sees = task == "generate" and "vision_config" in config and not _without_images(plan)
    dimensions = _dimensions(plan, config) if task == "embed" else None
    return Asked(int(part["port"]), name, task, engine=engine, vision=sees, dimensions=dimensions)


def _without_images(plan: Mapping[str, Any]) -> bool:
    """Say whether the operator keeps images from a model that could take them."""
    names = {one["name"] for group in plan.get("options", {}).values() for one in group} | set(plan.get("flags") or ())
    return bool(names & {"language-model-only", "limit-mm-per-prompt", "disable-multimodal"})


def _dimensions(plan: Mapping[str, Any], config: Mapping[str, Any]) -> int | None:
    """Return the model's width, which its embeddings have unless a further layer changes it (sentence-transformers)."""
    modules = Path(str(plan.get("model_path", ""))) / "modules.json"
    if modules.exists() and "Dense" in modules.read_text(encoding="utf-8", errors="replace"):
        return None
    width = config.get("hidden_size")
    return width if isinstance(width, int) else None


def of(asked: Asked) -> list[Probe]:
    """Return the questions that prove a model."""
    if asked.task == "embed":
        return [Probe("/v1/embeddings", {"input": list(DOCUMENTS)}, lambda reply: _embeddings(reply, asked.dimensions))]
    if asked.task == "rerank":
        return [Probe("/v1/rerank", {"query": QUERY, "documents": list(DOCUMENTS)}, _scores)]
    if asked.task == "classify":
        path = "/v1/classify" if asked.engine == "sglang" else "/classify"
        return [Probe(path, {"input": WORDS}, _probabilities)]
    question: dict[str, Any] = {"prompt": WORDS, "max_tokens": TOKENS, "temperature": 1.0}
    if asked.engine != "tensorrt_llm":
        question["logprobs"] = 1
    probes = [Probe("/v1/completions", question, _text)]
    return [*probes, _image()] if asked.vision else probes


def one_token(task: str) -> Probe:
    """Return the shortest question: whether anything comes back at all, as through the gateway."""
    if task == "generate":
        body = {"prompt": WORDS, "max_tokens": 1, "temperature": 0}
        return Probe("/v1/completions", body, lambda reply: "" if _tokens_of(reply) else "a token")
    return of(Asked(0, "", task))[0]


def _image() -> Probe:
    url = f"data:image/png;base64,{base64.b64encode(grey_png(IMAGE_PIXELS)).decode()}"
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is this?"}]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
    return Probe("/v1/chat/completions", body, lambda reply: "" if _tokens_of(reply) else "a token for an image")


def grey_png(pixels: int) -> bytes:
    """Return a grey square as PNG."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", pixels, pixels, 8, 2, 0, 0, 0)
    rows = (b"\0" + b"\x80" * (3 * pixels)) * pixels
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


# ------------------------------------------------------------------------------------------------ answers


def _tokens_of(reply: Any) -> int:
    try:
        return int(reply["usage"]["completion_tokens"]) if reply["choices"] else 0
    except (KeyError, TypeError, ValueError):
        return 0


def _text(reply: Any) -> str:
    count = _tokens_of(reply)
    if count < 1:
        return "a token"
    choice = reply["choices"][0]
    text, told = str(choice.get("text") or ""), choice.get("logprobs") or {}
    tokens, values = told.get("tokens") or [], told.get("token_logprobs") or []
    if any(not _is_finite(value) for value in values):
        return f"sense: its logprobs are no finite numbers ({text[:40]!r})"
    if count >= ENOUGH_TO_JUDGE and not text.replace("�", "").strip():
        return f"text: its {count} tokens are {text[:40]!r}"
    if _is_one_again_and_again(tokens or list(text.strip())):
        return f"sense: it gives one and the same token again and again ({text[:40]!r})"
    return ""


def _is_one_again_and_again(pieces: Sequence[Any]) -> bool:
    return len(pieces) >= ENOUGH_TO_JUDGE and all(one == pieces[0] for one in pieces)


def _is_finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _embeddings(reply: Any, dimensions: int | None) -> str:
    try:
        found = [one["embedding"] for one in reply["data"]]
        lengths = {len(one) for one in found}
    except (KeyError, TypeError):
        return "an embedding"
    if len(found) != len(DOCUMENTS) or lengths == {0}:
        return "an embedding for each text"
    if not all(_is_finite(number) for one in found for number in one):
        return "an embedding of finite numbers"
    if not all(any(one) for one in found):
        return "an embedding that is not all zero"
    if len(lengths) > 1 or (dimensions and lengths != {dimensions}):
        return f"embeddings of {dimensions or 'one'} numbers: theirs are {', '.join(map(str, sorted(lengths)))} long"
    return ""


def _scores(reply: Any) -> str:
    """Judge scores: vLLM gives `results` with `relevance_score`, SGLang a list with `score`, both the best first."""
    rows: Any = reply.get("results") if isinstance(reply, Mapping) else reply
    try:
        scores = [one.get("relevance_score", one.get("score")) for one in rows]
        places = sorted(one["index"] for one in rows)
    except (AttributeError, KeyError, TypeError):
        return "a score"
    if places != list(range(len(DOCUMENTS))):
        return "a score for each document"
    if not all(_is_finite(score) for score in scores):
        return "a score that is a finite number"
    return "" if scores == sorted(scores, reverse=True) else "scores in their order, the best first"


def _probabilities(reply: Any) -> str:
    try:
        numbers = reply["data"][0]["probs"]
    except (KeyError, IndexError, TypeError):
        return "probabilities"
    if not numbers:
        return "probabilities"
    return "" if all(_is_finite(number) for number in numbers) else "probabilities that are finite numbers"


def names_another(asked: Asked, listed: Any) -> str:
    """Return what else is served there, where `/v1/models` does not name the model that is asked for."""
    try:
        names = [str(one["id"]) for one in listed["data"]]
    except (KeyError, TypeError):
        return f"no list of models: {json.dumps(listed)[:200]}"
    return "" if asked.model in names else f"the model {', '.join(names) or 'none'} instead of {asked.model}"
