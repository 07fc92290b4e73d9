"""The rendered files of every engine in every stack, and of the planner's worked examples, as golden files.

    .venv/bin/python -m tests.unit.golden_files        writes them anew after a change that is meant

They lie in tests/unit/data/golden/STACK/ENGINE/CASE/; what the planner refuses stands in refused.txt of the stack, each
with its sentence. tests/engines feeds them to the engines' own parsers.
"""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import yaml

from gpuready import catalog
from gpuready.cli import asked, plan_docs
from gpuready.cli.plan_host import _pythons
from gpuready.outcome import Refusal
from gpuready.planning.model import known
from gpuready.planning.plan import effective_stack, make_plan
from gpuready.rendering.templates import Renderer, render_release
from gpuready.spec import check_declaration

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "tests/unit/data/golden"
LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
CARDS = {"cu124-volta": "v100s-32gb"}
"""Cards of stacks that are made for others than an H100."""
CONTEXT = {"vllm": "max-model-len", "sglang": "context-length", "tensorrt_llm": "max_seq_len"}
STRANGE = 'it\'s "quoted": yes, #5 \\ {a}\tümläut 漢字 😀'
"""A text that every careless way of writing YAML breaks."""
# Flags of an operator in every form that a file has, by engine; all are real options of the releases in the stacks.
DECLARED: dict[str, dict[str, Any]] = {
    "vllm": {
        "no-enable-chunked-prefill": True,
        "seed": 7,
        "override-generation-config": {"temperature": 0.5, "note": STRANGE},
        "allowed-origins": '["https://a.example", "https://b.example"]',
        "cudagraph-capture-sizes": [1, 2, 4],
        "tokenizer-mode": "slow",
    },
    "sglang": {
        "disable-radix-cache": True,
        "schedule-conservativeness": 0.3,
        "random-seed": 7,
        "json-model-override-args": {"note": STRANGE},
        "weight-version": "1e5",
    },
    "tensorrt_llm": {
        "kv_cache_config": {"enable_block_reuse": False, "free_gpu_memory_fraction": 0.8},
        "stream_interval": 4,
        "cuda_graph_config.enable_padding": True,
    },
}
DECLARED_OF = {
    # It takes no list from its file, and a mapping as JSON alone.
    "0.8.5.post1": {"seed": 7, "override-generation-config": {"note": STRANGE}, "tokenizer-mode": "slow"},
}


@dataclass(frozen=True)
class Case:
    """One deployment on one card."""

    name: str
    model: str
    card: str
    gpus: int
    declared: Mapping[str, Any]
    quantization: str | None = None


def stacks() -> Mapping[str, Any]:
    """Return the catalog's stacks."""
    found: Mapping[str, Any] = catalog.load("stacks")["stacks"]
    return found


def _load(text: str) -> dict[str, Any]:
    found = asked.workload_text(text)
    lengths = {name: {"p50": one.p50, "p99": one.p99} for name, one in (
        ("prompt_tokens", found.prompt), ("output_tokens", found.output))}  # fmt: skip
    return {**lengths, "concurrency": found.concurrency}


def _examples() -> Iterator[Case]:
    """Yield the worked examples that are one deployment, from the words behind `gpuready plan make`."""
    for one in yaml.safe_load((plan_docs.FOLDER / "examples.yaml").read_text())["examples"]:
        if "words" in one:
            words = shlex.split(one["words"])
            said = dict(zip(words[::2], words[1::2], strict=True))
            declared = {"workload": _load(said["--workload"]), "context": int(said.get("--context", 0))}
            count = int(said.get("--gpus", 1))
            yield Case(one["name"], said["--model"], said["--gpu"], count, declared, said.get("--quantization"))


def _cases(stack: str, engine: str) -> Iterator[Case]:
    """Yield every case of an engine in a stack."""
    card = CARDS.get(stack, "h100-80gb-sxm")
    version = stacks()[stack]["engines"][engine]["version"]
    load = {"workload": _load("800/4000:300/1500@16")}
    yield Case("plain", LLAMA, card, 1, load)
    yield Case("declared", LLAMA, card, 1, {**load, "flags": DECLARED_OF.get(version, DECLARED[engine])})
    yield Case("two-gpus", LLAMA, card, 2, {**load, "flags": {_TENSOR_PARALLEL[engine]: 2}})
    yield Case("fp8-cache", LLAMA, card, 1, {**load, "flags": {_KV_DTYPE[engine]: _FP8[engine]}})
    yield Case("embed", "BAAI/bge-m3", card, 1, {"workload": _load("200/500:1@16")})
    yield Case("draft", "deepseek-ai/DeepSeek-V3", "h200-141gb-sxm", 8, {**load, "draft": {"tokens": 2}})
    yield Case("lora", LLAMA, card, 1, {**load, "lora": {"slots": 4, "rank": 16}})
    yield Case("kv-offload", LLAMA, card, 1, {**load, "kv_offload_gib": 8})
    yield Case("eager", LLAMA, card, 1, {**load, "flags": _EAGER.get(engine, {})})
    if stack in ("cu128", "cu124-volta"):
        yield from _examples()


_TENSOR_PARALLEL = {"vllm": "tensor-parallel-size", "sglang": "tp-size", "tensorrt_llm": "tensor_parallel_size"}
_KV_DTYPE = {"vllm": "kv-cache-dtype", "sglang": "kv-cache-dtype", "tensorrt_llm": "kv_cache_config.dtype"}
_FP8 = {"vllm": "fp8", "sglang": "fp8_e4m3", "tensorrt_llm": "fp8"}
_EAGER = {"vllm": {"enforce-eager": True}, "sglang": {"disable-cuda-graph": True}}


def _spec(stack: str, card: str, gpus: int, deployments: list[dict[str, Any]]) -> dict[str, Any]:
    declared = {
        "gpuready_gpu_model": card,
        "gpuready_gpu_count": gpus,
        "gpuready_stack": stack,
        "gpuready_simulated": bool(stacks()[stack]["simulated_only"]),
        # What the planner refuses for its known vulnerabilities is not what is shown here.
        "gpuready_accept_advisories": [one["id"] for one in catalog.load("advisories")["advisories"]],
        "gpuready_deployments": deployments,
    }
    spec, failures = check_declaration("golden", declared, {}, lambda keys: ".".join(map(str, keys)))
    if spec is None or failures:
        raise Refusal(failures)
    plain: dict[str, Any] = spec.model_dump(exclude={"gpuready_proxy"})
    return plain


def planned(case: Case, stack: str, engine: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the checked declaration of a case, and the plan of its deployment.

    Raises:
        Refusal: with the planner's own sentences.
    """
    flags = dict(case.declared.get("flags") or {})
    if case.declared.get("context"):
        flags[CONTEXT[engine]] = case.declared["context"]
    declared = {key: value for key, value in case.declared.items() if key not in ("context", "flags")}
    place = {"name": "chat", "model": case.model, "model_path": f"/data/models/{case.name}"}
    spec = _spec(
        stack, case.card, case.gpus, [{**place, "engine": engine, "gpus": case.gpus, "flags": flags, **declared}]
    )
    found = effective_stack(spec, {})
    assert found is not None
    facts = {**_pythons(found), "gpus": [{}] * case.gpus}
    models = {case.model: known.facts(case.model, case.quantization)}
    # Where a lock lies, and of which bytes, is of no matter to the files; some are made on connected hosts alone.
    with mock.patch.multiple(catalog, has_lock=mock.Mock(return_value=True), lock_text=mock.Mock(return_value="")):
        return spec, make_plan("golden", spec, found, facts, models, {})["deployments"][0]


def files() -> dict[Path, str]:
    """Return every golden file by its path below FOLDER."""
    renderer = Renderer([ROOT / "templates"])
    found: dict[Path, str] = {}
    for stack, entry in stacks().items():
        refused = []
        for engine in entry["engines"]:
            for case in _cases(stack, engine):
                try:
                    spec, plan = planned(case, stack, engine)
                except Refusal as refusal:
                    refused.append(f"{engine}/{case.name}: {refusal.failures[0].sentence()}\n")
                    continue
                place = Path(stack, engine, case.name)
                for name, text in render_release(renderer, spec, plan, {}).items():
                    # What only repeats itself from case to case is kept once.
                    if name == "serve.yaml" or case.name == "plain":
                        found[place / name] = text
        if refused:
            found[Path(stack, "refused.txt")] = "".join(refused)
    return found


def main() -> None:
    """Write all golden files anew."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    for name, text in files().items():
        (FOLDER / name).parent.mkdir(parents=True, exist_ok=True)
        (FOLDER / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
