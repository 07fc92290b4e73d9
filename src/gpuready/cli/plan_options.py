"""The options of `gpuready plan`, one table for each verb."""

from __future__ import annotations

from dataclasses import replace

from gpuready.cli import asked, asked_settings
from gpuready.cli.verb import Option, number, whole
from gpuready.planning.compare import prices

_MODEL = Option(
    "model",
    "id of a model of the catalog, or a folder that holds config.json and perhaps the weights",
    "MODEL",
    known=asked.model_ids,
)
_CONFIG = Option("config", "a config.json; --model is then only the model's name", "FILE")
_QUANTIZATION = Option(
    "quantization",
    "a checkpoint of the model in this format (awq, gptq, fp8, w8a8, w4a16, mxfp4 ...) instead of the one as published",
    "FORMAT",
    known=lambda: asked.FORMATS,
)
_GPU = Option("gpu", "card: a key of the catalog, or another name that is known for one", "CARD", known=asked.cards)
_GPUS = Option("gpus", "how many of them, or how many MIG slices (default: 1)", "N", whole(1, 64), default=1)
_MIG = Option("mig", "MIG slices of this profile, e.g. 3g.40gb, instead of whole GPUs", "PROFILE", known=asked.profiles)
_ENGINE = Option(
    "engine",
    "vllm, sglang or tensorrt_llm (default: vllm)",
    "ENGINE",
    choices=lambda: asked.ENGINES,
)
_VERSION = Option("version", "version of the engine (default: of the newest stack that the card runs)", "VERSION")
_WORKLOAD = Option(
    "workload",
    "PROMPT:OUTPUT@REQUESTS, lengths in tokens as P50 or P50/P99, or a YAML or JSON file "
    f"(default: {asked.WORKLOAD})".replace("%", "%%"),
    "LOAD",
)
_SHARED = (
    Option(
        "context", "longest request in tokens, prompt and answer (default: from the workload)", "N", whole(1, 10**8)
    ),
    Option("allow-lossy", "also what may change answers: weights quantized while loading, an 8 bit KV cache"),
    Option("headroom", "memory of every GPU to be left to nobody", "GIB", number(0, 1000)),
    Option("set", "a setting that is to stay so, e.g. max_num_seqs=256 or kv_dtype=fp8", "NAME=VALUE", repeatable=True),
    Option("task", "what it is asked for (default: what the model is made for)", "TASK", choices=lambda: asked.TASKS),
    Option("draft", "speculative decoding: tokens at once, and the draft model if it is not built in", "N[:MODEL]"),
    Option("lora", "adapters served beside the model, e.g. 4x16", "SLOTSxRANK", asked_settings.lora),
    Option("kv-offload", "host memory for KV that no longer fits on the GPU", "GIB", number(0, 100_000)),
)
_PICTURES = (
    Option("svg", "also write the bars as a picture", "FILE"),
    Option("html", "also write a page that holds everything", "FILE"),
)
_HOST = Option(
    "host",
    "all deployments of a host together: a YAML or JSON file with its gpuready_* variables; no server is needed",
    "FILE",
)
_RATE = Option(
    "rate",
    "output tokens per second that were measured or promised, for everything or for one of --gpu, e.g. 8xh100=9000 or "
    "h100:3g.40gb=900; gives the cost of a million",
    "[CARD=]TOKENS",
    asked.rate,
    repeatable=True,
)
_TERM = Option(
    "term", "paid for by the month, quarter or year (default: month)", "TERM", default="month", choices=prices.terms
)
_ONE = (_MODEL, _CONFIG, _QUANTIZATION, _GPU, _GPUS, _MIG, _ENGINE, _VERSION, _WORKLOAD, *_SHARED)

MAKE = (*_ONE, _HOST, *_PICTURES)
EXPLAIN = (Option("input", "a stored plan, or what plan make --json has printed", "FILE"), *_ONE, _HOST, *_PICTURES)
COMPARE = (
    replace(_MODEL, repeatable=True),
    _CONFIG,
    replace(_QUANTIZATION, repeatable=True),
    replace(_GPU, repeatable=True, help=f"{_GPU.help}; 8xCARD for eight, CARD:PROFILE for a MIG slice"),
    replace(_GPUS, help="how many of each card that does not say it itself (default: 1)"),
    replace(_ENGINE, repeatable=True),
    replace(_VERSION, repeatable=True, help=f"{_VERSION.help}; VERSION or ENGINE=VERSION"),
    _WORKLOAD,
    *_SHARED,
    _RATE,
    _TERM,
)
RECOMMEND = (
    _MODEL,
    _CONFIG,
    replace(_QUANTIZATION, repeatable=True),
    replace(_ENGINE, repeatable=True, help="vllm, sglang or tensorrt_llm (default: all of them)"),
    _WORKLOAD,
    Option("budget", "what it may cost a month, in yuan, the currency of the catalog's prices", "N", number(0, 1e12)),
    Option("all", "also show what is too small, and why the others do not run"),
    *_SHARED,
    _RATE,
    _TERM,
)
BACKTEST = (Option("plot", "also write predicted against observed as an SVG picture", "FILE"),)
