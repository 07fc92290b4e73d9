"""Flags that an operator declares: known to the release, of its kind, in its words, or refused with what is right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gpuready.planning import support
from gpuready.planning.features import feature_flags
from gpuready.planning.flags import OWN, settings_of, split, table
from gpuready.planning.flags.values import refusal
from gpuready.planning.options.entry import Entry
from gpuready.planning.options.vllm import written
from gpuready.planning.support.capability import engines

PARSERS = Path(__file__).parent / "data/parsers"
V, S, T = ("vllm", "0.19.1"), ("sglang", "0.5.10.post1"), ("tensorrt_llm", "1.0.0")


def refused(flags: dict[str, Any], engine: tuple[str, str]) -> str:
    found = split("w", flags, *engine)
    (failure,) = found.failures
    return failure.sentence()


@pytest.mark.parametrize(
    ("engine", "flags", "sentence"),
    [
        (V, {"max-num-seqz": 8}, "vLLM 0.19.1 has no such flag; did you mean max-num-seqs?"),
        (V, {"gpu_memory_utilisation": 0.9}, "has no such flag; did you mean gpu-memory-utilization?"),
        (V, {"zzz": 1}, "w, flags.zzz: vLLM 0.19.1 has no such flag; remove it."),
        (V, {"mem-fraction-static": 0.9}, "vLLM 0.19.1 has no such flag"),
        (V, {"max-num-queued-reqs": 3}, "has no such flag, which is there from 0.2"),
        (V, {"fully-sharded-loras": "x"}, "flags.fully-sharded-loras = 'x' is refused: allowed is true or false"),
        (V, {"seed": "many"}, "flags.seed = 'many' is refused: allowed is a whole number"),
        (V, {"seed": 1.5}, "allowed is a whole number"),
        (V, {"seed": True}, "allowed is a whole number"),
        (V, {"scheduling-policy": "fastest"}, "allowed is fcfs, priority"),
        (V, {"max-model-len": "32q"}, "allowed is a whole number above 0"),
        (V, {"compilation-config": "{broken"}, "allowed is a mapping or a list, or a text that is JSON"),
        (V, {"tokenizer": "--host"}, "its reader takes it for a flag"),
        (V, {"tokenizer": ["a", "b"]}, "allowed is a text"),
        (("vllm", "0.8.5.post1"), {"allowed-origins": ["a"]}, "its reader takes no list from the file"),
        (V, {"swap-space": 4}, "has no such flag, which is there up to 0.17.1; set kv_offload_gib of the deployment"),
        (V, {"num-scheduler-steps": 8}, "which is there up to 0.9.2; leave it out: the V1 engine has no multi-step"),
        (V, {"rope-scaling": {}}, "say it in hf-overrides"),
        (V, {"task": "fly"}, "its values were auto, generate, embed, embedding, classify, score, reward"),
        (V, {"trust-remote-code": True}, "is set by gpuready itself; set trust_remote_code of the deployment"),
        (V, {"data_parallel_size": 2}, "is set by gpuready itself; remove it: gpus says which ones"),
        (S, {"max-runing-requests": 8}, "SGLang 0.5.10.post1 has no such flag; did you mean max-running-requests?"),
        (S, {"max-model-len": 4096}, "SGLang 0.5.10.post1 has no such flag"),
        (S, {"schedule-policy": "fastest"}, "allowed is lpm, random, fcfs"),
        (S, {"kv-cache-dtype": "fp9"}, "allowed is auto, fp8_e5m2, fp8_e4m3"),
        (S, {"lora-paths": ["a=/b"]}, "SGLang 0.5.10.post1 takes it on its command line alone, not from its file"),
        (S, {"admin-api-key": "x"}, "is a secret, and rendered files are no place for one"),
        (S, {"dp-size": 2}, "is set by gpuready itself"),
        (T, {"kv_cache_config": {}}, "the plan sets parts of it (kv_cache_config.free_gpu_memory_fraction, "),
        (T, {"cuda_graph_config": None}, "(cuda_graph_config.max_batch_size); name the parts that you want instead"),
        (
            T,
            {"kv_cache_config": {"free_gpu_memory_fracton": 0.9}},
            "did you mean kv_cache_config.free_gpu_memory_fraction?",
        ),
        (T, {"enable_chunked_prefill": "perhaps"}, "allowed is true or false"),
        (T, {"trust_remote_code": True}, "set trust_remote_code of the deployment"),
        (T, {"use_cuda_graph": True}, "cuda_graph_config: null switches them off"),
    ],
)
def test_refusals_name_the_flag_and_what_is_right(
    engine: tuple[str, str], flags: dict[str, Any], sentence: str
) -> None:
    assert sentence in refused(flags, engine)
    assert f"w, flags.{next(iter(flags))}" in refused(flags, engine)


@pytest.mark.parametrize(
    ("engine", "flags", "rest"),
    [
        (
            V,
            {"seed": 1, "disable_log_stats": True, "--max-logprobs": "5"},
            {"seed": 1, "disable-log-stats": True, "max-logprobs": "5"},
        ),
        (V, {"hf-overrides": {"a": [None, 1]}}, {"hf-overrides": {"a": [None, 1]}}),
        (V, {"max-num-seqs": None}, {}),
        (V, {"hf_overrides.rope_theta": 5.0}, {"hf-overrides": {"rope_theta": 5.0}}),
        (V, {"enable-auto-tool-choice": "true"}, {"enable-auto-tool-choice": True}),
        (S, {"enable-mixed-chunk": "false"}, {"enable-mixed-chunk": False}),
        (V, {"no-enable-log-requests": True}, {"no-enable-log-requests": True}),
        (V, {"cudagraph-capture-sizes": [1, 2, 4]}, {"cudagraph-capture-sizes": [1, 2, 4]}),
        (V, {"override-generation-config": '{"top_k": -1}'}, {"override-generation-config": '{"top_k": -1}'}),
        (S, {"torchao-config": "int8wo"}, {"torchao-config": "int8wo"}),
        (S, {"schedule-conservativeness": 0.3}, {"schedule-conservativeness": 0.3}),
        (T, {"kv_cache_config": {"enable_partial_reuse": False}}, {"kv_cache_config.enable_partial_reuse": False}),
        (T, {"something_new_of_the_release": 1}, {"something_new_of_the_release": 1}),
    ],
)
def test_what_the_release_reads_is_kept(engine: tuple[str, str], flags: dict[str, Any], rest: dict[str, Any]) -> None:
    assert split("w", flags, *engine) == ({}, rest, [], [])


@pytest.mark.parametrize(
    ("engine", "flags", "rest", "settings", "note"),
    [
        (
            V,
            {"task": "embed"},
            {"runner": "pooling", "convert": "embed"},
            {},
            "is runner 'pooling' and convert 'embed' in vLLM 0.19.1",
        ),
        (V, {"disable-log-requests": True}, {}, {}, "is its own default in vLLM 0.19.1"),
        (V, {"cuda-graph-sizes": [1, 2]}, {"cudagraph-capture-sizes": [1, 2]}, {}, "is cudagraph-capture-sizes [1, 2]"),
        (
            V,
            {"guided-decoding-backend": "xgrammar", "guided-decoding-disable-fallback": True},
            {"structured-outputs-config": {"backend": "xgrammar", "disable_fallback": True}},
            {},
            "is structured-outputs-config {'backend': 'xgrammar'}",
        ),
        (("sglang", "0.5.23"), {"cuda-graph-max-bs": 8}, {}, {"graph_max_batch": 8}, "is cuda-graph-max-bs-decode 8"),
        (
            ("sglang", "0.5.23"),
            {"disable-piecewise-cuda-graph": True},
            {"cuda-graph-backend-prefill": "disabled"},
            {},
            "",
        ),
        (T, {"tp_size": 2}, {}, {"tp": 2}, "is tensor_parallel_size 2 in TensorRT-LLM 1.0.0"),
        (T, {"cuda_graph_padding_enabled": True}, {"cuda_graph_config.enable_padding": True}, {}, "enable_padding"),
    ],
)
def test_a_former_flag_is_said_in_the_words_of_the_release(
    engine: tuple[str, str], flags: dict[str, Any], rest: dict[str, Any], settings: dict[str, Any], note: str
) -> None:
    found = split("w", flags, *engine)
    assert (found.rest, found.settings, found.failures) == (rest, settings, [])
    assert note in found.notes[0]


def test_a_former_flag_stays_where_the_release_has_it() -> None:
    assert split("w", {"task": "embed"}, "vllm", "0.8.5.post1") == ({}, {"task": "embed"}, [], [])
    assert split("w", {"cuda-graph-max-bs": 8}, *S).settings == {"graph_max_batch": 8}


@pytest.mark.parametrize(
    ("engine", "flags"),
    [
        (V, {"max-num-seqs": 8, "max_num_seqs": 9}),
        (V, {"enforce-eager": True, "no-enforce-eager": True}),
        (V, {"task": "embed", "runner": "pooling"}),
        (S, {"tp-size": 2, "tensor-parallel-size": 2}),
        (S, {"random-seed": 1, "--random-seed": 2}),
    ],
)
def test_two_spellings_of_one_flag_are_refused(engine: tuple[str, str], flags: dict[str, Any]) -> None:
    first, second = flags
    assert split("w", flags, *engine).failures[0].sentence() == (
        f"w, flags.{second} and flags.{first} are the same flag; keep one of them."
    )


@pytest.mark.parametrize("value", [True, False, None, "1e5", "true", "0123", 1e-05, [1, "x"], "a: b\n- c"])
def test_a_part_named_with_dots_stands_in_its_mapping_as_it_was_written(value: Any) -> None:
    """vLLM's reader of its file would have a switch take the next flag for its value, and read a text as a number."""
    found = split("w", {"compilation-config.pass_config.one": value, "compilation_config.level": 3}, *V)
    assert (found.settings, found.failures) == ({}, [])
    assert found.rest == {"compilation-config": {"pass_config": {"one": value}, "level": 3}}
    said = written(Entry("compilation-config", found.rest["compilation-config"], ""))
    assert said is not None
    assert json.loads(said.value) == {"pass_config": {"one": value}, "level": 3}


def test_parts_named_with_dots_and_as_a_mapping_are_one() -> None:
    flags = {"compilation-config": {"pass_config": {"a": 1}}, "compilation-config.pass_config.b": 2}
    assert split("w", flags, *V).rest == {"compilation-config": {"pass_config": {"a": 1, "b": 2}}}


@pytest.mark.parametrize(
    "flags",
    [
        {"compilation-config": {"mode": 3}, "compilation-config.mode": 0},
        {"compilation-config": {"pass_config": {"a": 1}}, "compilation-config.pass_config": 2},
        {"compilation-config": '{"mode": 3}', "compilation-config.mode": 0},
        {"compilation-config.pass_config": None, "compilation-config.pass_config.a": 1},
    ],
)
def test_a_part_that_is_set_twice_is_refused(flags: dict[str, Any]) -> None:
    first, second = flags
    assert f"w, flags.{second} and flags.{first} are the same flag" in refused(flags, V)


@pytest.mark.parametrize(
    ("engine", "name", "sentence"),
    [
        (V, "port.x", "is set by gpuready itself"),
        (V, "seed.x", "has no such flag; did you mean seed?"),
        (V, "hf-overrides.", "has no such flag; did you mean hf-overrides?"),
        (V, "MAX-NUM-SEQS", "has no such flag; did you mean max-num-seqs?"),
        (S, "page-size.x", "has no such flag; did you mean page-size?"),
        (T, "..", "has no such flag; remove it"),
        (T, "backend.x", "is set by gpuready itself"),
    ],
)
def test_a_part_of_what_is_no_mapping_is_refused(engine: tuple[str, str], name: str, sentence: str) -> None:
    assert sentence in refused({name: 1}, engine)


def test_a_draft_and_a_part_of_its_flag_say_the_same() -> None:
    rest = split("w", {"speculative-config.num_speculative_tokens": 3}, *V).rest
    _, failures = feature_flags("w", {"engine": "vllm", "draft": {"tokens": 2}}, V[1], rest)
    assert [one.sentence() for one in failures] == [
        "w, flags.speculative-config and draft say the same; keep one of them."
    ]


def test_other_spellings_are_settings_of_the_planner_too() -> None:
    assert split("w", {"tensor_parallel_size": 2, "disable-radix-cache": True}, *S).settings == {
        "tp": 2,
        "prefix_caching": False,
    }
    assert split("w", {"no-enable-prefix-caching": True}, *V).settings == {"prefix_caching": False}


@pytest.mark.parametrize(("engine", "page"), engines().items())
def test_every_setting_of_the_planner_is_a_flag_of_the_releases_that_have_it(engine: str, page: dict[str, Any]) -> None:
    """What engine_support.yaml says of names and releases was read apart from the tables."""
    releases = table(engine, page["newest"]).page["releases"]
    for version in releases:
        known = table(engine, version)
        for field in page["flags"]:
            name = support.flag(engine, version, field)
            its = settings_of(engine, version)
            said = (
                name if engine != "tensorrt_llm" or name in its else {"tp_size": "tensor_parallel_size"}.get(str(name))
            )
            if said and engine != "tensorrt_llm":
                assert known.flag(said) is not None, (version, field, said)


@pytest.mark.parametrize("engine", OWN)
def test_owned_flags_exist_in_some_release(engine: str) -> None:
    page = table(engine, engines()[engine]["newest"]).page
    names = {
        name for known, eras in page["flags"].items() for name in (known, *(n for e in eras for n in e.get("also", ())))
    }
    assert {name for name in OWN[engine] if name not in names} <= {"uds", "fd", "host", "port", "use-ray"}


@pytest.mark.parametrize("path", sorted(PARSERS.glob("*.json")), ids=lambda path: path.stem)
def test_tables_say_of_planted_mistakes_what_the_real_parsers_said(path: Path) -> None:
    """A flag that a real parser refused as unknown is unknown here, and one that it took is known."""
    record = json.loads(path.read_text(encoding="utf-8"))
    known = table(record["engine"], record["version"])
    judged = 0
    for name, said in record["mistakes"].items():
        flag = name.split(":")[0].strip()
        text = json.dumps(said)
        if f"unrecognized arguments: --{flag}" in text:
            judged += 1
            assert known.flag(flag) is None, flag
    assert judged > 3


@pytest.mark.parametrize("path", sorted(PARSERS.glob("*.json")), ids=lambda path: path.stem)
def test_tables_know_every_flag_of_the_files_that_real_parsers_took(path: Path) -> None:
    import yaml

    record = json.loads(path.read_text(encoding="utf-8"))
    known, seen = table(record["engine"], record["version"]), 0
    for name, said in record["golden"].items():
        stack, case = name.split("/")
        file = Path(__file__).parent / "data/golden" / stack / record["engine"] / case / "serve.yaml"
        if said or not file.exists():
            continue
        for flag, value in yaml.safe_load(file.read_text(encoding="utf-8")).items():
            one = known.flag(flag)
            assert one is not None, flag
            assert refusal(one, value) == "", (flag, value, one)
            seen += 1
    assert seen > 50
