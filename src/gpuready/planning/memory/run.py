"""The contract between the planner and the arithmetic of each engine: what is asked, and what is answered."""

from __future__ import annotations

from dataclasses import dataclass, field

GIB = 1024**3


@dataclass(frozen=True)
class Device:
    """One GPU, or one MIG slice, as an engine finds it."""

    name: str
    """Key of the catalog, e.g. h100-80gb-sxm, with the profile after a colon for a slice: h100-80gb-sxm:3g.40gb."""
    total_gib: float
    """What CUDA reports as total."""
    compute: float
    """Compute capability, e.g. 9.0."""
    free_gib: float | None = None
    """Free before the engine starts; None: all but what a fresh context takes."""
    nvlink: bool = True
    """GPUs of one server reach each other by NVLink; False: by PCIe only, which costs no custom all-reduce buffers."""
    unified: bool = False
    """Memory shared with the host, whose page cache moves what is free."""
    board_mib: float | None = None
    """What nvidia-smi reports as total, which is more than CUDA's; None: not known."""
    vendor: str = "nvidia"
    """nvidia or amd; `compute` of an AMD card is the number of its architecture, e.g. 9.4 for gfx942."""
    share: float = 1.0
    """Part of the card's multiprocessors that is this slice's; 1 for a whole GPU."""


@dataclass(frozen=True)
class Draft:
    """Speculative decoding: what drafts, and how many tokens at once."""

    tokens: int
    weight_bytes: int = 0
    """Of a draft model of its own; the layers that the checkpoint brings are counted from its facts."""
    kv_bytes_per_token: float = 0


@dataclass(frozen=True)
class Lora:
    """Adapters that are served beside the base model."""

    slots: int
    rank: int


@dataclass(frozen=True)
class Run:
    """How an engine is started. None: the engine's own default, which depends on its version and the card."""

    engine: str
    """vllm, sglang or tensorrt_llm."""
    version: str
    """One release (0.19.1), or a range whose ends lie in one set of constants (0.8-0.9, 0.21+, 0.8.x)."""
    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    """GPUs over which whole experts are spread; 1: experts are split like other layers."""
    dcp: int = 1
    attention_dp: bool = False
    """`dp` splits the attention of the same `tp` GPUs, each group with requests of its own (SGLang, TensorRT-LLM)."""
    dtype: str | None = None
    quantization: str | None = None
    """A format that the engine makes while it loads, e.g. fp8; None: the checkpoint's own."""
    kv_dtype: str | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    memory_fraction: float | None = None
    """gpu-memory-utilization, mem-fraction-static or free_gpu_memory_fraction, by the engine's own meaning."""
    kv_bytes: int | None = None
    """A KV cache of this many bytes per GPU; the fraction is then of no account."""
    block_size: int | None = None
    enforce_eager: bool = False
    prefix_caching: bool | None = None
    chunked_prefill_size: int | None = None
    graph_max_batch: int | None = None
    task: str = "generate"
    draft: Draft | None = None
    lora: Lora | None = None


@dataclass(frozen=True)
class Range:
    """A figure with the band in which nine of ten measurements are expected. Units: those of its place."""

    value: float
    low: float
    high: float

    def __add__(self, other: Range) -> Range:
        return Range(self.value + other.value, self.low + other.low, self.high + other.high)

    def scaled(self, factor: float) -> Range:
        """Return the figure times a factor that is not negative."""
        return Range(self.value * factor, self.low * factor, self.high * factor)

    @staticmethod
    def exact(value: float) -> Range:
        """Return a figure that is known without a band."""
        return Range(value, value, value)


@dataclass(frozen=True)
class Estimate:
    """Where the memory of the fullest GPU of a deployment goes. All GiB are per GPU."""

    run: Run
    """The run with the engine's defaults filled in."""
    constants: str
    """Which set of constants was used, e.g. "vllm 0.17 to 0.20"."""
    total_gib: float
    budget_gib: float
    """What the engine allows itself for everything that it counts."""
    outside: Range
    """Used before the engine looks or after it has counted: context, communication, graphs in older versions."""
    weights: Range
    activation: Range
    non_torch: Range
    graphs: Range
    graphs_counted: bool
    """The engine takes the graphs off its budget; else they are part of `outside`."""
    kv: Range
    """GiB of the KV cache; not above 0 where nothing is left."""
    kv_tokens: Range
    """Tokens, as the engine prints them for `max_model_len`."""
    bytes_per_token: float
    """Bytes that one more token of a long request takes on this GPU."""
    block_tokens: int
    blocks: int
    request_gib: float
    """What one request of `max_model_len` tokens takes."""
    fits: bool
    """One request of `max_model_len` fits by the expected figures; `surely_fits` even by the worst of their bands."""
    surely_fits: bool
    refusal: str
    """Why it does not fit, as a sentence with the arithmetic; empty where it does."""
    free_gib: float = 0.0
    """Of the total, what nobody uses at run time: the headroom."""
    notes: tuple[str, ...] = field(default_factory=tuple)
    whole_prompts: bool = False
    """A prompt is computed in one pass: the release has no chunked prefill here."""
