"""The shared `gpuready_*` variables, as pydantic models. Field descriptions are the operator's documentation."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    Tag,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from gpuready.spec.values import number, whole

MOST_GPUS = 16


def _whole(value: object) -> int:
    number = whole(value)
    if number is None:
        raise ValueError("allowed is a whole number in decimal digits")
    return number


def _decimal(value: object) -> float:
    found = number(value)
    if found is None:
        raise ValueError("allowed is a number in decimal digits")
    return found


def _truth(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError("allowed are true and false")
    return value


@dataclass(frozen=True)
class Form:
    """The form of a text, and what is allowed in words, which end the sentence "allowed ..."."""

    pattern: str
    allowed: str

    def _check(self, value: str) -> str:
        if not re.fullmatch(self.pattern, value):
            raise ValueError(f"allowed {self.allowed}")
        return value

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        words = re.sub(r"^(is|are) ", "", self.allowed)
        return {**handler(schema), "pattern": f"^({self.pattern})$", "x-allowed": words}


def _gpus_kind(value: object) -> str | None:
    if isinstance(value, (dict, MigClaim, SharedClaim)):
        keys = value if isinstance(value, dict) else type(value).model_fields
        return None if "mig" in keys and "shared" in keys else "shared" if "shared" in keys else "mig"
    return "list" if isinstance(value, list) else "count" if whole(value) is not None else None


def _number_as_text(value: object) -> object:
    return str(value) if isinstance(value, int | float) else value


WHOLE = BeforeValidator(_whole)
DECIMAL = BeforeValidator(_decimal)
Truth = Annotated[bool, BeforeValidator(_truth)]
Tokens = Annotated[int, Field(ge=1, le=100_000_000), WHOLE]
Count = Annotated[int, Field(ge=1, le=MOST_GPUS), WHOLE]
Index = Annotated[int, Field(ge=0, le=MOST_GPUS - 1), WHOLE]
Expected = Annotated[int, Field(ge=1, le=1_000_000), WHOLE]
Name = Annotated[
    str, Form(r"[a-z][a-z0-9-]{0,31}", "are 1 to 32 lower case letters, digits and dashes, a letter first")
]
ModelId = Annotated[
    str,
    Form(
        r"(?!.*(\.\.|//))[A-Za-z0-9][A-Za-z0-9_./:@+-]{0,127}",
        "are at most 128 letters, digits and _ . / : @ + -, a letter or digit first, without .. and //",
    ),
]
AbsolutePath = Annotated[
    str,
    Form(
        r"(?!.*/\.\.?(/|$))/[A-Za-z0-9_./:@+=,~-]{1,500}",
        "is an absolute path of letters, digits and _ . / : @ + = , ~ -, without . and .. as a part",
    ),
]
AdvisoryId = Annotated[str, Form(r"(CVE-20\d\d-\d{4,7}|GHSA(-[0-9a-z]{4}){3})", "are ids such as CVE-2026-48746")]
Repository = Annotated[
    str,
    Form(
        r"(?!.*(\.\.|--))[A-Za-z0-9][A-Za-z0-9_.-]{0,95}(/[A-Za-z0-9][A-Za-z0-9_.-]{0,95})?",
        "is the name of a repository on the hub, e.g. Qwen/Qwen2.5-7B-Instruct",
    ),
]
Revision = Annotated[
    str,
    Form(
        r"(?!.*(\.\.|//))[A-Za-z0-9][A-Za-z0-9._/-]{0,99}",
        "is the full hash of a commit: 40 hexadecimal digits",
    ),
]
FlagName = Annotated[
    str,
    Form(r"-{0,2}[A-Za-z][A-Za-z0-9._-]{0,99}", "are letters, digits, dots and dashes, as the engine spells it"),
]


VariableName = Annotated[str, Form(r"[A-Za-z_][A-Za-z0-9_]{0,99}", "are letters, digits and underscores")]
VariableValue = Annotated[
    str,
    BeforeValidator(lambda value: str(int(value)) if isinstance(value, bool) else _number_as_text(value)),
    Form(r"[^\x00-\x1f\x7f]{0,1000}", "is a text of one line, a number, true or false"),
]


class _Declared(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Percentiles(_Declared):
    """Half of the requests stay below p50, 99 of 100 below p99."""

    p50: Tokens = Field(description="Tokens of the median request.")
    p99: Tokens = Field(description="Tokens that only one request in a hundred exceeds.")

    @model_validator(mode="after")
    def _ordered(self) -> Percentiles:
        if self.p99 < self.p50:
            raise ValueError(f"p99 ({self.p99}) is below p50 ({self.p50})")
        return self


class Workload(_Declared):
    """What the deployment has to serve."""

    prompt_tokens: Percentiles = Field(description="Length of the prompts.")
    output_tokens: Percentiles = Field(description="Length of the answers.")
    concurrency: Annotated[int, Field(ge=1, le=100_000), WHOLE] = Field(
        description="Requests in flight at once, at the busiest time."
    )
    preemption_probability: Annotated[float, Field(ge=0.0001, le=0.5), DECIMAL] = Field(
        default=0.01,
        description="How likely it may be, at that time, that the KV cache is too small and a request waits or is "
        "computed again.",
    )


class MigClaim(_Declared):
    """A claim on MIG slices."""

    mig: Annotated[str, Form(r"[1-9]g\.[0-9]{1,3}gb(\+[a-z.]+|-[a-z]+)*", "are profiles such as 3g.40gb")] = Field(
        description="MIG profile, in NVIDIA's spelling, e.g. 3g.40gb."
    )
    count: Annotated[int, Field(ge=1, le=7 * MOST_GPUS), WHOLE] = Field(default=1, description="Number of slices.")


class SharedClaim(_Declared):
    """A claim on a part of one GPU."""

    shared: Index = Field(description="GPU of which it gets a part, beside the other deployments that claim one of it.")


Gpus = Annotated[
    Annotated[Count, Tag("count")]
    | Annotated[list[Index], Field(min_length=1, max_length=MOST_GPUS), Tag("list")]
    | Annotated[MigClaim, Tag("mig")]
    | Annotated[SharedClaim, Tag("shared")],
    Discriminator(_gpus_kind),
]


class Source(_Declared):
    """Where a model is downloaded from: one commit of a repository, so that its files can never change."""

    hub: Literal["huggingface", "modelscope"] = Field(
        default="huggingface", description="The hub; models_endpoint names a mirror of it."
    )
    repository: Repository | None = Field(
        default=None, description="The repository's name on the hub; not set: the name of the model."
    )
    revision: Revision = Field(
        description="The commit: all 40 digits of its hash. A branch or tag is refused, with the commit it has now."
    )


class Draft(_Declared):
    """Speculative decoding: what drafts, and how far."""

    model: ModelId | None = Field(
        default=None, description="Id of the model that drafts; not set: the layers for it that the checkpoint brings."
    )
    model_path: AbsolutePath | None = Field(
        default=None, description="Folder on the server that holds the drafting model's files."
    )
    source: Source | None = Field(
        default=None, description="Where the drafting model is downloaded from, instead of model_path."
    )
    tokens: Annotated[int, Field(ge=1, le=32), WHOLE] = Field(description="Tokens that are drafted at once.")

    @model_validator(mode="after")
    def _is_whole(self) -> Draft:
        _one_place(self.model_path, self.source)
        place = "source" if self.source else "model_path"
        if (self.model is None) != (self.model_path is None and self.source is None):
            unset, other = ("model", place) if self.model is None else (place, "model")
            raise ValueError(f"{other} is set and {unset} is not; set both, or neither for the checkpoint's own layers")
        return self


def _one_place(path: str | None, source: Source | None, key: str = "model_path") -> None:
    if path is not None and source is not None:
        raise ValueError(f"{key} and source are both set: the files lie on the server, or are downloaded")


class Adapter(_Declared):
    """One LoRA adapter, which the API serves under a name of its own."""

    name: ModelId = Field(description="Name under which the API serves the model with this adapter.")
    path: AbsolutePath | None = Field(
        default=None, description="Folder on the server that holds adapter_config.json and adapter_model.safetensors."
    )
    source: Source | None = Field(
        default=None, description="Where the adapter is downloaded from; without a repository: the name of the adapter."
    )

    @model_validator(mode="after")
    def _has_a_place(self) -> Adapter:
        _one_place(self.path, self.source, "path")
        if self.path is None and self.source is None:
            raise ValueError("neither path nor source is set; set one of them")
        return self


class Lora(_Declared):
    """Room for adapters beside the model."""

    slots: Annotated[int, Field(ge=1, le=256), WHOLE] = Field(description="Adapters that one batch may use.")
    rank: Annotated[Literal[8, 16, 32, 64, 128, 256, 320, 512], WHOLE] = Field(
        default=16, description="Greatest rank of an adapter."
    )
    adapters: list[Adapter] = Field(
        default_factory=list, description="The adapters that are loaded when the engine starts."
    )


class Deployment(_Declared):
    """One model served by one engine."""

    name: Name = Field(description="Name of the deployment: unit, folder and backend carry it.")
    model: ModelId = Field(
        description="Id under which the API serves the model. Ids under gpuready-sim/ are made locally, with random "
        "weights, on simulated servers only."
    )
    model_path: AbsolutePath | None = Field(
        default=None, description="Folder on the server that holds the model's files."
    )
    source: Source | None = Field(
        default=None, description="Where the model is downloaded from, instead of model_path."
    )
    trust_remote_code: Truth | None = Field(
        default=None,
        description="Python code of the model's repository: true fetches and runs it; false does neither, for models "
        "that the engine knows by itself. Not set: a model that brings code is refused.",
    )
    allow_pickle: Truth = Field(
        default=False,
        description="Weights may be pickle files (.bin, .pt), which can run code when they are loaded, where there "
        "are no safetensors.",
    )
    engine: Literal["vllm", "sglang", "tensorrt_llm"] = Field(description="Inference engine.")
    gpus: Gpus = Field(
        description="How many GPUs (4), which ones ([0, 1]), a part of one ({shared: 0}), or MIG slices "
        "({mig: 3g.40gb, count: 1})."
    )
    workload: Workload = Field(description="What it has to serve; all memory settings follow from it.")
    task: Literal["generate", "embed", "rerank", "classify"] | None = Field(
        default=None, description="What it is asked for; not set: what the model is made for."
    )
    allow_lossy: Truth = Field(
        default=False,
        description="The planner may choose what can change answers: weights quantized while loading, 8 bit KV.",
    )
    apply_cures: Truth = Field(
        default=False,
        description=(
            "After a release that ran out of memory the next plan takes the recorded cure as a bound, until this "
            "declaration changes; not set: it is only said."
        ),
    )
    headroom_gib: Annotated[float, Field(ge=0, le=512), DECIMAL] | None = Field(
        default=None,
        description="Memory of every GPU that is left to nobody, in GiB; not set: what the engine's version needs.",
    )
    draft: Draft | None = Field(default=None, description="Speculative decoding.")
    lora: Lora | None = Field(default=None, description="LoRA adapters beside the model, and room for them.")
    kv_offload_gib: Annotated[float, Field(ge=0, le=16384), DECIMAL] = Field(
        default=0, description="RAM of each replica, in GiB, for the KV cache of what no longer fits on its GPUs."
    )
    flags: dict[FlagName, Any] = Field(
        default_factory=dict, description="Engine flags in the engine's own spelling; they win over the plan."
    )
    environment: dict[VariableName, VariableValue] = Field(
        default_factory=dict, description="Environment variables of the engine, beside the planned ones; they win."
    )

    @model_validator(mode="after")
    def _lies_in_one_place(self) -> Deployment:
        _one_place(self.model_path, self.source)
        return self


class Expect(_Declared):
    """What the server must have, beside its GPUs; preflight compares."""

    cpu_cores: Expected | None = Field(default=None, description="Physical CPU cores, at least.")
    ram_gib: Expected | None = Field(default=None, description="RAM in GiB, at least.")
    nvme_count: Expected | None = Field(default=None, description="NVMe drives, at least.")
    nvswitch_count: Expected | None = Field(default=None, description="NVSwitches, exactly.")
    nvlink_links_per_gpu: Expected | None = Field(
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


ProxyAddress = Annotated[
    str, AfterValidator(_proxy_address), Field(json_schema_extra={"x-allowed": "http://host:port, with user:password@"})
]
Direct = Annotated[str, Form(r"[A-Za-z0-9_.:*/-]{1,253}", "are hosts, domains and networks")]


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
    gpuready_gpu_count: Count = Field(description="GPUs in the server.")
    gpuready_stack: Annotated[str, Field(min_length=1)] = Field(
        description="Proven set of driver, CUDA and engines, a key of the catalog of stacks, e.g. cu128."
    )
    gpuready_deployments: list[Deployment] = Field(default_factory=list, description="What the server serves.")
    gpuready_expect: Expect = Field(default_factory=Expect, description="What the server must have.")
    gpuready_proxy: Proxy | None = Field(
        default=None,
        description="Proxy for every download on the server (apt, uv, pip); one with a password belongs in a vault.",
    )
    gpuready_simulated: Truth = Field(
        default=False, description="The server is a simulated one, made by this checkout's machine builder."
    )
    gpuready_accept_advisories: list[AdvisoryId] = Field(
        default_factory=list,
        description="Known vulnerabilities of engines that the operator accepts, by id; docs/advisories.md lists them.",
    )
    gpuready_replan: Truth = Field(
        default=False, description="Take this version's plan even where the plan on the server still holds."
    )
