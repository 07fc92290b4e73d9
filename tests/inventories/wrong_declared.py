"""Wrong shared variables: types, ranges, unknown and missing keys, contradictions, hostile texts, templates."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from tests.inventories.case import (
    DECLARED,
    DEPLOYMENT,
    GIB,
    SECOND,
    Case,
    Path_,
    as_yaml,
    changed,
    recorded_facts,
    spelled,
    with_text,
)

ONE: Path_ = ("gpuready_deployments", 0)
LOAD: Path_ = (*ONE, "workload")
NUMBERS: dict[Path_, tuple[int, int]] = {
    ("gpuready_gpu_count",): (1, 16),
    (*ONE, "gpus"): (1, 16),
    (*LOAD, "prompt_tokens", "p50"): (1, 100_000_000),
    (*LOAD, "output_tokens", "p99"): (1, 100_000_000),
    (*LOAD, "concurrency"): (1, 100_000),
    (*ONE, "draft", "tokens"): (1, 32),
    (*ONE, "lora", "slots"): (1, 256),
    ("gpuready_expect", "cpu_cores"): (1, 1_000_000),
    ("gpuready_expect", "nvswitch_count"): (1, 1_000_000),
}
TEXTS: tuple[Path_, ...] = (
    ("gpuready_gpu_model",),
    ("gpuready_stack",),
    (*ONE, "name"),
    (*ONE, "model"),
    (*ONE, "model_path"),
)
MAPPINGS: tuple[Path_, ...] = (
    LOAD, (*LOAD, "prompt_tokens"), ("gpuready_expect",), (*ONE, "flags"), (*ONE, "draft"), (*ONE, "lora"),
)  # fmt: skip
DECIMALS: dict[Path_, tuple[float, float]] = {
    (*LOAD, "preemption_probability"): (0.0001, 0.5),
    (*ONE, "headroom_gib"): (0, 512),
    (*ONE, "kv_offload_gib"): (0, 16384),
}


def wrong(kind: str, path: Path_, value: Any, *says: str, **more: Any) -> Case:
    """Return a case in which one place has a wrong value, and the refusal names that place."""
    return Case(kind, spelled(path), says, as_yaml(changed(path, value)), **more)


def spelled_wrong(kind: str, path: Path_, text: str, *says: str, **more: Any) -> Case:
    """Return a case in which one place has a value with a spelling of its own."""
    return Case(kind, spelled(path), says, with_text(path, text), **more)


def types(dice: random.Random) -> Iterator[Case]:
    """Yield values of a wrong type."""
    words = "allowed is a whole number in decimal digits"
    for path in NUMBERS:
        wanted = "allowed are a number of GPUs" if path[-1] == "gpus" else words
        yield wrong("a word for a number", path, dice.choice(["eight", "many", "8 GPUs", ""]), wanted)
        yield wrong("a fraction for a number", path, dice.choice([1.5, 8.0, 0.1]), wanted)
        yield wrong("a boolean for a number", path, True, "= true is refused", wanted)
        yield (
            wrong("null for a number", path, None, "= null is refused", wanted)
            if "expect" not in str(path)
            else wrong("a list for a number", path, [1, 2], "= [1, 2] is refused", wanted)
        )
    for path in list(NUMBERS)[:5]:
        wanted = "allowed are a number of GPUs" if path[-1] == "gpus" else words
        yield wrong("digits that are not ASCII", path, "\uff18", r"'\uff18'", wanted)
        yield wrong(
            "digits with something around them", path, dice.choice(["8 ", " 8", "+8", "8.", "8e0", "1_0"]), wanted
        )
    for path in DECIMALS:
        for no_number in ("much", "8 GiB", True, [1], ""):
            yield wrong("no number", path, no_number, "is refused", "allowed is a number in decimal digits")
    for answer in ("yes", 1, "true", [True]):
        path = (*ONE, "allow_lossy")
        yield wrong("no answer to a question of yes or no", path, answer, "is refused", "allowed are true and false")
    for gpu in ([0], "first", None, True):
        text = as_yaml(changed((*ONE, "gpus"), {"shared": gpu}))
        says = ("is refused", "allowed is a whole number")
        yield Case("no GPU to share", spelled((*ONE, "gpus", "shared")), says, text)
    for path in TEXTS:
        yield wrong("a number for a text", path, dice.choice([7, 12.8]), "is refused", "YAML reads it as a number")
        yield spelled_wrong(
            "a word that YAML reads as a boolean", path, dice.choice(["on", "no", "yes", "off"]), "booleans"
        )
        yield spelled_wrong("a date for a text", path, "2026-11-30", "2026-11-30", "allowed is a text")
        yield wrong("a list for a text", path, ["a"], "= ['a'] is refused", "allowed is a text")
    for path in MAPPINGS:
        yield wrong("a text for a mapping", path, "large", "'large'", "allowed is a mapping")
        yield wrong("a list for a mapping", path, [1], "= [1] is refused", "allowed is a mapping")
    for value in ({"a": 1}, "chat", 3, None):
        yield wrong("no list of deployments", ("gpuready_deployments",), value, "is refused", "allowed is a list")
    yield wrong(
        "a deployment that is no mapping", ONE, "chat", "'chat'", "allowed is a mapping with the keys name, model"
    )
    yield wrong("a deployment that is no mapping", ONE, None, "= null is refused", "allowed is a mapping")
    for answer in ("maybe", "1", 1, 0, "tru\u0435", [True]):
        path = (dice.choice(["gpuready_simulated", "gpuready_replan"]),)
        yield wrong("no answer to a question of yes or no", path, answer, "is refused", "allowed are true and false")
    for text in ("true", "false", "yes", "No"):
        path = (dice.choice(["gpuready_simulated", "gpuready_replan"]),)
        yield wrong("a boolean as a text", path, text, f"= '{text}' is refused", "allowed are true and false")


def ranges(dice: random.Random) -> Iterator[Case]:
    """Yield numbers beyond their range, and numbers that are none."""
    for path, (low, high) in NUMBERS.items():
        yield wrong(
            "below the range", path, value := dice.choice([low - 1, -1, -(10**6)]), f"= {value} is refused", str(low)
        )
        yield wrong(
            "above the range", path, value := high + dice.choice([1, 10**7]), f"= {value} is refused", str(high)
        )
        yield wrong("a huge number", path, 10**30, "= 1000000000000000000000000000000 is refused", f"up to {high}")
    for path, bounds in DECIMALS.items():
        yield wrong("below the range", path, -0.5, "= -0.5 is refused", f"from {bounds[0]}")
        yield wrong("above the range", path, bounds[1] + 0.25, "is refused", f"up to {bounds[1]}")
        for text in (".inf", "-.inf", ".nan", "'1e400'"):
            yield spelled_wrong("infinite, or not a number", path, text, "is refused", "a number in decimal digits")
    for gpu in (-1, 16, 10**30):
        path = (*ONE, "gpus", "shared")
        text = as_yaml(changed((*ONE, "gpus"), {"shared": gpu}))
        yield Case("an index beyond the range", spelled(path), (f"= {gpu} is refused",), text)
    for rank in (0, 7, 1024):
        yield wrong("no rank of an adapter", (*ONE, "lora"), {"slots": 1, "rank": rank}, "lora.rank", "320 or 512")
    for path in list(NUMBERS)[2:5]:
        for text, shown in (
            (".inf", "inf"),
            ("-.inf", "-inf"),
            (".nan", "nan"),
            ("1.0e+400", "inf"),
            ("1e400", "'1e400'"),
        ):
            yield spelled_wrong("infinite, or not a number", path, text, f"= {shown} is refused", "whole number")
    for gpus in ([16], [-1], [0, 99]):
        key = f"{spelled((*ONE, 'gpus'))}[{len(gpus) - 1}]"
        yield Case("an index beyond the range", key, ("is refused",), as_yaml(changed((*ONE, "gpus"), gpus)))
    yield wrong("too few or too many entries", (*ONE, "gpus"), [], "= [] is refused", "1 to 16 entries")
    yield wrong("too few or too many entries", (*ONE, "gpus"), [*range(16), 0], "is refused", "1 to 16 entries")


def keys(dice: random.Random) -> Iterator[Case]:
    """Yield unknown and missing keys at each level."""
    near = {
        ("gpuready_deployment",): "gpuready_deployments",
        ("gpuready_gpu_modle",): "gpuready_gpu_model",
        (*ONE, "wrokload"): "workload",
        (*ONE, "modle_path"): "model_path",
        (*LOAD, "concurency"): "concurrency",
        (*LOAD, "prompt_tokens", "p95"): "p99",
        ("gpuready_expect", "nvme_cnt"): "nvme_count",
        (*LOAD, "preemption_probabilty"): "preemption_probability",
        (*ONE, "headroom"): "headroom_gib",
        (*ONE, "kv_offload"): "kv_offload_gib",
    }
    for path, meant in near.items():
        yield wrong("a misspelled key", path, 5, "no such", f"did you mean {meant}?")
    for path in (
        ("gpuready_xyzzy",),
        (*ONE, "xyzzy"),
        (*LOAD, "xyzzy"),
        (*LOAD, "prompt_tokens", "qqq"),
        ("gpuready_expect", "zz"),
    ):
        yield wrong("an unknown key", path, dice.choice([None, 1, "x"]), "no such", "known are ")
    for name, meant in (
        ("gpu_ready_stack", "gpuready_stack"),
        ("GPUREADY_REPLAN", "gpuready_replan"),
        ("gatway_port", "gateway_port"),
        ("base_package", "base_packages"),
    ):
        yield wrong("a misspelled prefix", (name,), 1, "no such variable", f"did you mean {meant}?")
    for key in (1, True, None, 2.5):
        path = (*ONE, "flags")
        yield Case(
            "a key that is no text",
            spelled(path),
            ("a key has to be a text", "quote it"),
            as_yaml(changed(path, {key: 1})),
        )
    for name in ("gpuready_gpu_model", "gpuready_gpu_count", "gpuready_stack"):
        yield Case("a variable that is missing", name, ("is not set",), as_yaml(changed((name,), ...)))
    for path in (
        *((*ONE, key) for key in DEPLOYMENT if key != "model_path"),
        (*LOAD, "output_tokens", "p50"),
        (*LOAD, "concurrency"),
    ):
        yield Case("a key that is missing", spelled(path), ("is not set",), as_yaml(changed(path, ...)))
    yield Case(
        "a key that is missing",
        spelled((*ONE, "gpus", "mig")),
        ("is not set",),
        as_yaml(changed((*ONE, "gpus"), {"count": 1})),
    )
    yield Case(
        "a misspelled key", spelled((*ONE, "gpus", "cuont")), ("did you mean count?",),
        as_yaml(changed((*ONE, "gpus"), {"mig": "3g.40gb", "cuont": 1})),
    )  # fmt: skip


def two(**change: Any) -> str:
    """Return the file of two deployments of which the second differs."""
    return as_yaml({**DECLARED, "gpuready_deployments": [DEPLOYMENT, {**SECOND, **change}]})


def contradictions(dice: random.Random) -> Iterator[Case]:
    """Yield values that are good alone and cannot be together."""
    for path in ((*LOAD, "prompt_tokens"), (*LOAD, "output_tokens")):
        low = dice.randrange(1, 100)
        yield wrong("p99 below p50", path, {"p50": 100, "p99": low}, f"p99 ({low}) is below p50 (100)")
    yield Case("one name twice", "gpuready_deployments[1].name", ("'chat'", "has the same name"), two(name="chat"))
    yield Case("one model twice", "gpuready_deployments[1].model", ("has the same model",), two(model="org/llama"))
    chat = "deployment chat, gpus"
    for unset, half in (("model_path", {"model": "org/small"}), ("model", {"model_path": "/data/small"})):
        says = (f"{unset} is not", "set both, or neither")
        yield wrong("a draft by half", (*ONE, "draft"), {"tokens": 3, **half}, *says)
    claims = {"shared": 0, "mig": "3g.40gb"}
    yield wrong("a slice and a part at once", (*ONE, "gpus"), claims, "is refused", "{shared: 0} or {mig: 3g.40gb")
    beside = {**DECLARED, "gpuready_deployments": [{**DEPLOYMENT, "gpus": [2]}, {**SECOND, "gpus": {"shared": 2}}]}
    yield Case("a GPU that others share", f"{chat} = [2]", ("GPU 2 is shared by others",), as_yaml(beside))
    beyond = as_yaml(changed((*ONE, "gpus"), {"shared": 9}))
    yield Case("a GPU that is not there", "gpus = {'shared': 9}", ("there is no GPU 9", "0 to 7"), beyond)
    draft = as_yaml(changed((*ONE, "draft"), {"tokens": 3}))
    yield Case("a draft without layers for it", "deployment chat, draft", ("brings no layers that draft",), draft)
    said: dict[str, tuple[Any, str, Any]] = {
        "draft": ({"tokens": 3, "model": "org/small", "model_path": "/data/small"}, "speculative-config", {}),
        "lora": ({"slots": 2}, "max-loras", 2),
        "task": ("embed", "convert", "embed"),
        "kv_offload_gib": (8, "kv-offloading-size", 8),
    }
    for name, (value, flag, its) in said.items():
        accepting = {**DECLARED, "gpuready_accept_advisories": ["CVE-2026-54234"]}
        text = as_yaml(changed((*ONE, "flags"), {flag: its}, changed((*ONE, name), value, accepting)))
        says = (f"flags.{flag} and {name} say the same", "keep one of them")
        yield Case("a flag that a field says already", "deployment chat", says, text)
    yield Case(
        "a GPU named twice", f"{chat} = [3, 3]", ("a GPU is named twice",), as_yaml(changed((*ONE, "gpus"), [3, 3]))
    )
    yield Case(
        "a GPU that is not there",
        "gpus = [0, 9]",
        ("there is no GPU 9", "0 to 7"),
        as_yaml(changed((*ONE, "gpus"), [0, 9])),
    )
    yield Case(
        "more GPUs than there are",
        "deployments ask for 9 GPUs",
        ("chat 9", "gpuready_gpu_count is 8"),
        as_yaml(changed((*ONE, "gpus"), 9)),
    )
    yield Case("more GPUs than there are", "deployments ask for 11 GPUs", ("chat 1, code 10",), two(gpus=10))
    both = as_yaml({**DECLARED, "gpuready_deployments": [{**DEPLOYMENT, "gpus": [0, 1]}, {**SECOND, "gpus": [1, 2]}]})
    yield Case("one GPU for two deployments", "deployment code, gpus = [1, 2]", ("GPU 1 is taken by another",), both)
    for mig in ("3g.40gb", "7g.80gb+me"):
        yield Case(
            "MIG where none is served",
            "gpus = ",
            (mig, "MIG slices are planned but not served yet"),
            as_yaml(changed((*ONE, "gpus"), {"mig": mig, "count": 2})),
        )
    for mig in ("big", "9g", "3g.40gb; rm", ""):
        path = (*ONE, "gpus", "mig")
        yield Case(
            "no MIG profile",
            spelled(path),
            ("is refused", "profiles such as 3g.40gb"),
            as_yaml(changed((*ONE, "gpus"), {"mig": mig})),
        )
    text = as_yaml(changed((*ONE, "engine"), "sglang", changed(("gpuready_stack",), "cu129")))
    yield Case("an engine that the stack lacks", "deployment chat, engine = 'sglang'", ("is not in stack cu129",), text)
    for engine, python, words in (
        ("tensorrt_llm", "3.11", ("no lock for the server's Python 3.11", "Ubuntu 24.04 (3.12)", "engines_pythons: {")),
        ("tensorrt_llm", "3.12", ("has no lock in this checkout yet", "scripts/lock tensorrt-llm-1.0.0-cu128-py312")),
        (
            "sglang",
            "3.13",
            ("no lock for the server's Python 3.13", "Debian 12 (3.11)", "/opt/python3.12/bin/python3}"),
        ),
    ):
        text = as_yaml(changed((*ONE, "engine"), engine))
        yield Case("an engine for another Python", "deployment chat", words, text, facts={"python": python})
    yield wrong("an unknown engine", (*ONE, "engine"), "vlm", "'vlm'", "'vllm', 'sglang' or 'tensorrt_llm'")
    yield wrong("an unknown engine", (*ONE, "engine"), "VLLM", "'VLLM'", "'vllm', 'sglang' or 'tensorrt_llm'")
    yield wrong("an unknown task", (*ONE, "task"), "chat", "'chat'", "'generate', 'embed', 'rerank' or 'classify'")
    for variable, remedy in {
        "VLLM_PORT": "each replica's own",
        "HF_TOKEN": "it names a secret",
        "MAX_SEQUENCE_LENGTH": "set flags.max-model-len",
        "VLLM_LOGING_LEVEL": "did you mean VLLM_LOGGING_LEVEL?",
    }.items():
        text = as_yaml(changed((*ONE, "environment"), {variable: "8000"}))
        yield Case("a variable that is refused", f"environment.{variable}", ("is refused", remedy), text)
    lines = as_yaml(changed((*ONE, "environment"), {"MY_OWN": "a\nb"}))
    yield Case("a variable of two lines", "environment.MY_OWN", ("one line",), lines)
    broken = as_yaml({**DECLARED, "gpuready_accept_advisories": ["CVE-26-1"]})
    says = ("'CVE-26-1'", "ids such as CVE-2026-48746")
    yield Case("an id that is none", "gpuready_accept_advisories[0]", says, broken)
    unknown = as_yaml({**DECLARED, "gpuready_accept_advisories": ["CVE-2026-48747"]})
    says = ("CVE-2026-48747 is not known", "did you mean CVE-2026-48746?")
    yield Case("an id that nobody knows", "gpuready_accept_advisories", says, unknown)
    images = as_yaml({**DECLARED, "gpuready_deployments": [{**DEPLOYMENT, "flags": {"enable-prompt-embeds": True}}]})
    says = ("nothing stands against CVE-2026-55514", "gpuready_accept_advisories: [CVE-2026-55514]")
    yield Case("a vulnerability that is open", "deployment chat", says, images)
    yield wrong("an unknown stack", ("gpuready_stack",), "cu218", "no such stack", "did you mean cu128?")
    yield wrong(
        "an unknown card", ("gpuready_gpu_model",), "h100-80gb-smx", "no such GPU", "did you mean h100-80gb-sxm?"
    )
    text = as_yaml(changed((*ONE, "flags"), {"tensor-parallel-size": 3}, changed((*ONE, "gpus"), 3)))
    yield Case("three GPUs for 32 heads", "deployment chat", ("32 attention heads do not divide by 3", "tp 2"), text)
    text = as_yaml(changed((*LOAD, "prompt_tokens"), {"p50": 10, "p99": 200_000}))
    yield Case("requests beyond the model's context", "deployment chat", ("201500 tokens together", "131072"), text)
    yield Case(
        "no folder of the model",
        "deployment chat: model_path is not set",
        ("name the folder",),
        as_yaml(changed((*ONE, "model_path"), ...)),
    )
    sim = as_yaml(changed((*ONE, "model_path"), ..., changed((*ONE, "model"), "gpuready-sim/tiny-qwen2")))
    yield Case("a simulated model on a real server", "'gpuready-sim/tiny-qwen2'", ("simulated servers only",), sim)
    none = as_yaml(changed((*ONE, "model_path"), ..., changed((*ONE, "model"), "gpuready-sim/none")))
    yield Case("a simulated model that there is not", "'gpuready-sim/none'", ("no such simulated model",), none)
    nvml = recorded_facts()["nvml"]
    named = [{**one, "name": "Tesla V100S-PCIE-32GB"} for one in nvml["gpus"]]
    card = {"gpus": [{"address": "0", "device_id": "1df6"}] * 8, "nvml": {**nvml, "gpus": named}}
    volta = as_yaml(changed(("gpuready_gpu_model",), "v100s-32gb"))
    yield Case(
        "a card that the engine does not run on",
        "engine = 'vllm'",
        ("does not run on v100s-32gb", "choose gpuready_stack: cu124-volta"),
        volta,
        facts=card,
    )
    plain = as_yaml(DECLARED)
    other = {"gpus": [{"address": "0", "device_id": "20b2"}] * 8}
    yield Case(
        "another card than declared",
        "gpuready_gpu_model = h100-80gb-sxm",
        ("contradicted by the hardware", "a100-80gb-sxm"),
        plain,
        facts=other,
    )
    yield wrong("another number than there are", ("gpuready_gpu_count",), 4, "but the PCI bus shows 8 NVIDIA GPUs")
    yield wrong(
        "what is paid for and not there",
        ("gpuready_expect",),
        {"nvme_count": 9},
        ".nvme_count = 9, but the server has 8",
    )
    yield wrong(
        "what is paid for and not there", ("gpuready_expect",), {"ram_gib": 9000}, ".ram_gib = 9000, but the server has"
    )
    yield wrong(
        "simulated where it is not", ("gpuready_simulated",), True, "not made by this checkout's machine builder"
    )
    small = {"models": {"/data/llama": {**recorded_facts()["models"]["/data/llama"], "weight_bytes": 200 * GIB}}}
    yield Case(
        "a model that does not fit",
        "deployment chat: org/llama does not fit on 1 x H100",
        ("weights 200.0", "give it 3 GPUs", "take a checkpoint in FP8"),
        plain,
        facts=small,
    )


def flagged(kind: str, name: str, value: Any, *says: str) -> Case:
    """Return a case in which a flag has a wrong name or value, and the refusal names it."""
    return Case(kind, f"deployment chat, flags.{name}", says, as_yaml(changed((*ONE, "flags"), {name: value})))


def flags(_: random.Random) -> Iterator[Case]:
    """Yield engine flags that are not to be set, contradict the plan, or are no flags."""
    where = "deployment chat, flags."
    for name in ("port", "host", "model", "data-parallel-size", "data_parallel_size", "--served-model-name"):
        yield flagged("a flag that gpuready owns", name, 1, "is set by gpuready itself")
    yield flagged("a flag that is a secret", "api-key", "hunter2", "is a secret")
    twice = (("max-num-seqs", "max_num_seqs", 8), ("enable-prefix-caching", "no-enable-prefix-caching", True))
    for first, second, same in twice:
        text = as_yaml(changed((*ONE, "flags"), {first: same, second: same}))
        yield Case("one flag twice", f"{where}{second}", ("are the same flag",), text)
    for name, meant in (("max-num-seq", "max-num-seqs"), ("gpu_memory_utilisation", "gpu-memory-utilization")):
        yield flagged("a misspelled flag", name, 8, "no such flag", f"did you mean {meant}?")
    beyond = "a number of a flag beyond its range"
    for value in (True, "many", 0, -1, 1.5, 10**30):
        yield flagged(beyond, "max-num-seqs", value, "is refused", "a whole number above 0")
    for spelling in (".nan", ".inf", "1.01", "0"):
        text = with_text((*ONE, "flags"), f"{{gpu-memory-utilization: {spelling}}}")
        yield Case(beyond, f"{where}gpu-memory-utilization", ("is refused", "at most 1"), text)
    for spelling, shown in (("2026-11-30", "2026-11-30"), (".nan", "nan"), ("{1: a}", "1")):
        text = with_text((*ONE, "flags"), f"{{seed: {spelling}}}")
        says = (shown, "is refused", "allowed are texts, finite numbers")
        yield Case("a value of a flag that its file cannot hold", f"{where}seed", says, text)
    yield flagged(
        "a context that the memory cannot hold", "max-model-len", 9_000_000, "= 9000000 is refused", "at most 131072"
    )
    for part in (0.999, 0.1):
        says = ("does not fit", "GiB", "; set at ")
        yield flagged("a part of the memory that cannot be", "gpu-memory-utilization", part, *says)
    for name, no_setting in (("enforce-eager", "perhaps"), ("dtype", 16), ("quantization", ["fp8"])):
        yield flagged("a setting of a wrong type", name, no_setting, "is refused", "allowed is ")
    yield flagged("a format that is none", "kv-cache-dtype", "fp7")
    for name in ("a: b", "max num seqs", "x\ny: 1", "", "é", "a" * 200):
        text = as_yaml(changed((*ONE, "flags"), {name: 1}))
        yield Case("no name of a flag", spelled((*ONE, "flags")), ("no such key", "as the engine spells it"), text)


HOSTILE = {
    "a path that climbs": "../../etc/passwd",
    "shell characters": "x; rm -rf / #",
    "shell substitution": "$(reboot)",
    "a line break": "chat\nname: other",
    "a terminal's escape sequence": "\x1b[2J\x1b[31mall is well",
    "another direction of writing": "chat\u202etahc",
    "characters of no width": "ch\u200bat",
    "look-alike letters": "ch\u0430t",
    "a systemd specifier": "%h/%i",
    "a very long text": "x" * 100_000,
    "non-ASCII letters": "模型",
    "quotes": "a'b\"c",
}


def hostile(_: random.Random) -> Iterator[Case]:
    """Yield texts that a shell, a terminal, a file or a reader could be fooled by."""
    for kind, text in HOSTILE.items():
        for path in (*TEXTS, (*ONE, "engine")):
            shown = ascii(text)[1:30] if len(text) > 80 else ascii(text)[1:-1]
            yield wrong(kind, path, text, shown, "")
    for path in TEXTS:
        yield spelled_wrong("a NUL character", path, '"a\\0b"', r"'a\x00b'")
        yield spelled_wrong("braces that are no template", path, '!unsafe "{{ 1 }}"', "'{{ 1 }}'", evaluated=True)
    for value in ("/", "data/x", "/data/../etc", "/data/./x", "/data/a b", "/data/$x", "/data/x\n", "~/x"):
        yield wrong("no absolute path", (*ONE, "model_path"), value, ascii(value)[1:-1], "an absolute path")
    for value in ("/etc/passwd", "a/../b", "a//b", "-x", "x" * 129, "a b"):
        yield wrong("no id of a model", (*ONE, "model"), value, "is refused", "without .. and //")


def templates(_: random.Random) -> Iterator[Case]:
    """Yield templates that cannot be evaluated, or come to something wrong. Only Ansible can judge them."""
    cannot = {
        "an undefined variable": ("{{ nobody_set_this }}", "'nobody_set_this' is undefined"),
        "a template with a mistake": ("{{ a( }}", "syntax error in template"),
        "an unknown filter": ("{{ 1 | no_such_filter }}", "no_such_filter"),
        "a lookup that fails": ("{{ lookup('pipe', 'exit 3') }}", "'pipe' failed"),
        "a division by zero": ("{{ 1 // 0 }}", "cannot be evaluated"),
    }
    for kind, (text, words) in cannot.items():
        for path in (("gpuready_gpu_count",), ("gpuready_gpu_model",), (*ONE, "name")):
            yield Case(kind, str(path[0]), ("cannot be evaluated", words), as_yaml(changed(path, text)), evaluated=True)
    for name in ("gpuready_stack", "gpuready_gpu_count"):
        text = as_yaml(changed((name,), f"{{{{ {name} }}}}"))
        yield Case("a variable that refers to itself", name, ("it refers to itself",), text, evaluated=True)
    text = as_yaml({**DECLARED, "ansible_python_interpreter": "{{ nobody_set_this }}"})
    key, words = "ansible_python_interpreter", "cannot be evaluated: 'nobody_set_this' is undefined"
    yield Case("an undefined variable of the connection", key, (words,), text, evaluated=True)
    comes_to: list[tuple[Path_, str, str]] = [
        (("gpuready_gpu_count",), "{{ 'e' + 'ight' }}", "'eight'"),
        (("gpuready_gpu_model",), "{{ 3 + 4 }}", "= 7"),
        (("gpuready_deployments",), "{{ {'a': 1} }}", "{'a': 1}"),
        ((*ONE, "name"), "{{ lookup('pipe', 'printf \"a b\"') }}", "'a b'"),
        ((*ONE, "name"), "{{ '%c' | format(27) }}[2J", r"'\x1b[2J'"),
        ((*LOAD, "concurrency"), "{{ none }}", "null"),
        ((*ONE, "gpus"), "{{ 10 ** 5000 }}", "(cannot be shown)"),
    ]
    for path, text, shown in comes_to:
        yield wrong("a template that comes to something wrong", path, text, shown, "is refused", evaluated=True)
