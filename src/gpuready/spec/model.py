"""The shared `gpuready_*` variables, as pydantic models. Field descriptions are the operator's documentation."""

from __future__ import annotations

from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

Name = Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]{0,31}$")]
ModelId = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_./:@+-]{0,127}$")]
Positive = Annotated[int, Field(ge=1)]


class _Declared(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Percentiles(_Declared):
    """Half of the requests stay below p50, 99 of 100 below p99."""

    p50: Positive = Field(description="Tokens of the median request.")
    p99: Positive = Field(description="Tokens that only one request in a hundred exceeds.")

    @model_validator(mode="after")
    def _ordered(self) -> Percentiles:
        if self.p99 < self.p50:
            raise ValueError(f"p99 ({self.p99}) is below p50 ({self.p50})")
        return self


class Workload(_Declared):
    """What the deployment has to serve."""

    prompt_tokens: Percentiles = Field(description="Length of the prompts.")
    output_tokens: Percentiles = Field(description="Length of the answers.")
    concurrency: Positive = Field(description="Requests in flight at once, at the busiest time.")


class MigClaim(_Declared):
    """A claim on MIG slices."""

    mig: str = Field(description="MIG profile, in NVIDIA's spelling, e.g. 3g.40gb.")
    count: Positive = Field(default=1, description="Number of slices.")


class Deployment(_Declared):
    """One model served by one engine."""

    name: Name = Field(description="Name of the deployment: unit, folder and backend carry it.")
    model: ModelId = Field(
        description="Id under which the API serves the model. Ids under gpuready-sim/ are made locally, with random "
        "weights, on simulated servers only."
    )
    model_path: Annotated[str, Field(pattern=r"^/")] | None = Field(
        default=None, description="Folder on the server that holds the model's files."
    )
    engine: Literal["vllm", "sglang", "tensorrt_llm"] = Field(description="Inference engine.")
    gpus: Positive | Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)] | MigClaim = Field(
        description="How many GPUs (4), which ones ([0, 1]), or MIG slices ({mig: 3g.40gb, count: 1})."
    )
    workload: Workload = Field(description="What it has to serve; all memory settings follow from it.")
    flags: dict[str, Any] = Field(
        default_factory=dict, description="Engine flags in the engine's own spelling; they win over the plan."
    )


class Expect(_Declared):
    """What the server must have, beside its GPUs; preflight compares."""

    cpu_cores: Positive | None = Field(default=None, description="Physical CPU cores, at least.")
    ram_gib: Positive | None = Field(default=None, description="RAM in GiB, at least.")
    nvme_count: Positive | None = Field(default=None, description="NVMe drives, at least.")
    nvswitch_count: Positive | None = Field(default=None, description="NVSwitches, exactly.")
    nvlink_links_per_gpu: Positive | None = Field(
        default=None, description="Active NVLink links of every GPU, exactly; needs the driver."
    )


def _proxy_address(value: str) -> str:
    """Check a proxy's address; the refusal does not repeat it, because it may hold a password."""
    try:
        parts = urlsplit(value)
        good = parts.scheme in ("http", "https") and parts.hostname and parts.port and parts.path in ("", "/")
    except ValueError:
        good = False
    if not good or any(character.isspace() for character in value):
        raise ValueError("allowed is http://host:port or http://user:password@host:port, special characters as %40")
    return value


ProxyAddress = Annotated[str, AfterValidator(_proxy_address)]
Direct = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:*/-]+$")]


class Proxy(_Declared):
    """The proxy through which the server reaches what it downloads."""

    http: ProxyAddress | None = Field(default=None, description="Proxy for http; not set: the one for https.")
    https: ProxyAddress | None = Field(default=None, description="Proxy for https; not set: the one for http.")
    no_proxy: list[Direct] = Field(
        default_factory=list, description="Hosts and domains reached without it, beside the server itself."
    )

    @model_validator(mode="after")
    def _is_one(self) -> Proxy:
        if self.http is None and self.https is None:
            raise ValueError("neither http nor https is set")
        return self


class HostSpec(_Declared):
    """Everything that the shared variables say about one host."""

    gpuready_gpu_model: Annotated[str, Field(min_length=1)] = Field(
        description="GPU card, a key or alias of the catalog of GPUs, e.g. h100-80gb-sxm."
    )
    gpuready_gpu_count: Annotated[int, Field(ge=1, le=16)] = Field(description="GPUs in the server.")
    gpuready_stack: Annotated[str, Field(min_length=1)] = Field(
        description="Proven set of driver, CUDA and engines, a key of the catalog of stacks, e.g. cu128."
    )
    gpuready_deployments: list[Deployment] = Field(default_factory=list, description="What the server serves.")
    gpuready_expect: Expect = Field(default_factory=Expect, description="What the server must have.")
    gpuready_proxy: Proxy | None = Field(
        default=None,
        description="Proxy for every download on the server (apt, uv, pip); one with a password belongs in a vault.",
    )
    gpuready_simulated: bool = Field(
        default=False, description="The server is a simulated one, made by this checkout's machine builder."
    )
    gpuready_replan: bool = Field(
        default=False, description="Take this version's plan even where the plan on the server still holds."
    )

    @model_validator(mode="after")
    def _names_differ(self) -> HostSpec:
        for what in ("name", "model"):
            seen: set[str] = set()
            for deployment in self.gpuready_deployments:
                value = getattr(deployment, what)
                if value in seen:
                    raise ValueError(f"two deployments have the {what} {value}")
                seen.add(value)
        return self
