"""`gpuready plan`: what is asked for is read, or refused in one sentence; what is answered is shown and written."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.unit.planning_options import ESTIMATE, option

from gpuready.cli import asked, asked_settings, main, plan, plan_compare
from gpuready.cli.screen import Screen
from gpuready.operations import readback
from gpuready.outcome import Exit, Failure, Refusal
from gpuready.planning import search
from gpuready.planning.explain import rules, steps
from gpuready.planning.memory.run import Device, Draft, Lora
from gpuready.planning.search import Found
from gpuready.planning.wish import Lengths, Place, Wish, Workload

LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 1000,
    "max_position_embeddings": 2048,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def asks(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Wish, Place]]:
    """Answer every search with one option, and keep what was asked; a T4 is always too small."""
    seen: list[tuple[Wish, Place]] = []

    def find(wish: Wish, place: Place, alternatives: bool = True) -> Found:
        seen.append((wish, place))
        if place.device.name == "t4":
            why = "weights 14.99 of 14.70 GiB"
            return Found((), (Failure("plan.memory", "deployment chat does not fit", why, "more GPUs"),))
        made = option(place=place, concurrency=min(64, wish.workload.concurrency))
        return Found((replace(made, wish=wish, run=replace(made.run, engine=wish.engine, version=wish.version)),))

    monkeypatch.setattr(search, "search", find)
    for room in (steps, rules):
        monkeypatch.setattr(room, "estimate", lambda model, device, run: ESTIMATE)
    monkeypatch.setattr(steps, "request_gib", lambda model, run, tokens: 0.134)
    return seen


def said(*words: str) -> list[str]:
    """Run a command that is refused, and return what it says."""
    result, _ = main.run(["plan", *words], screen=Screen())
    assert result.exit == Exit.REFUSED
    return [failure.sentence() for failure in result.failures]


# ------------------------------------------------------------------------------------------------- asking


def test_what_is_asked_for_reaches_the_search(asks: list[tuple[Wish, Place]]) -> None:
    words = ["--model", LLAMA.lower(), "--gpu", "h100", "--gpus", "2", "--engine", "vllm", "--version", "0.19.1"]
    words += ["--workload", "800/16000:300/1500@64", "--set", "max-num-seqs=32", "--set", "kv_dtype=fp8"]
    words += ["--context", "32768", "--allow-lossy", "--headroom", "2.5", "--lora", "4x16"]
    words += ["--draft", "3:Qwen/Qwen2.5-0.5B-Instruct"]
    result, _ = main.run(["plan", "make", *words, "--kv-offload", "64", "--task", "generate"])
    assert result.failures == []
    ((wish, place),) = asks
    assert (wish.model_id, wish.engine, wish.version, place.count) == (LLAMA, "vllm", "0.19.1", 2)
    assert place.device.name == "h100-80gb-sxm"
    assert wish.workload == Workload(Lengths(800, 16000), Lengths(300, 1500), 64)
    assert wish.settings == {"max_num_seqs": 32, "kv_dtype": "fp8", "max_model_len": 32768}
    assert (wish.allow_lossy, wish.headroom_gib, wish.kv_offload_gib) == (True, 2.5, 64.0)
    assert (wish.draft, wish.lora) == (Draft(3, 988_065_536, 12288), Lora(4, 16))


def test_engine_and_version_are_those_of_the_stack_that_the_card_can_run(asks: list[tuple[Wish, Place]]) -> None:
    main.run(["plan", "make", "--model", LLAMA, "--gpu", "a100-40gb-sxm"])
    assert (asks[0][0].engine, asks[0][0].version) == ("vllm", "0.19.1")
    main.run(["plan", "make", "--model", LLAMA, "--gpu", "v100s-32gb"])
    # The stack's vLLM needs compute capability 7.5.
    assert asks[1][0].engine == "vllm"
    assert asks[1][0].version.startswith("0.8.5")


def test_layers_that_draft_have_to_be_in_the_checkpoint(asks: list[tuple[Wish, Place]]) -> None:
    assert said("make", "--model", LLAMA, "--gpu", "h100", "--draft", "3") == [
        f"--draft: the checkpoint of {LLAMA} brings no layers that draft; name a draft model, TOKENS:MODEL, "
        "or leave it out."
    ]
    main.run(["plan", "make", "--model", "deepseek-ai/DeepSeek-V3", "--gpu", "h200", "--gpus", "8", "--draft", "1"])
    assert asks[0][0].draft == Draft(1)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--draft", "0"], "--draft = '0' is refused: allowed is a whole number from 1 to 64; the form is TOKENS or "),
        (["--draft", "1:no/model"], "--draft = 'no/model' is not in the catalog; "),
        (["--set", "dp=2"], "--set dp=2: no such setting; say it with --gpus, from which the planner makes replicas."),
        (["--set", "attention_dp=true"], "--set attention_dp: vllm 0.19.1 has no such setting; leave it out."),
        (
            ["--set", "chunked_prefill_size=512"],
            "--set chunked_prefill_size: vllm 0.19.1 has no such setting; set max_",
        ),
        (
            ["--set", "block_size=1000000"],
            "--set block_size=1000000 is refused: allowed is a whole number from 1 to 1024",
        ),
        (["--set", "tp=17"], "--set tp=17 is refused: allowed is a whole number from 1 to 16."),
        (["--engine", "sglang", "--set", "kv_bytes=9"], "--set kv_bytes: sglang "),
    ],
)
def test_what_would_have_no_effect_is_refused(words: list[str], sentence: str) -> None:
    (told,) = said("make", "--model", LLAMA, "--gpu", "h100", *words)
    assert told.startswith(sentence)


def test_what_an_engine_cannot_is_a_row_of_a_comparison(asks: list[tuple[Wish, Place]]) -> None:
    words = ["compare", "--model", LLAMA, "--gpu", "v100s-32gb", "--gpu", "h100", "--engine", "vllm"]
    result, _ = main.run(["plan", *words, "--engine", "sglang"], screen=Screen())
    assert result.summary == "3 of 4 ways run"
    (row,) = [one for one in result.data["rows"] if one["requests"] is None]
    assert (row["card"], row["engine"]) == ("v100s-32gb", "sglang")
    assert row["refusal"].startswith("SGLang in any release on NVIDIA V100S")
    assert "SGLang in any release on NVIDIA V100S" in " ".join((result.page or "").split())
    assert said("compare", "--model", LLAMA, "--gpu", "v100s-32gb", "--engine", "sglang") == [row["refusal"]]


def test_a_name_of_any_length_is_one_short_sentence() -> None:
    (told,) = said("make", "--model", "x" * 5000, "--gpu", "h100")
    assert told.startswith(f"--model = '{'x' * 200}'... is not in the catalog; ")
    assert len(told) < 500


@pytest.mark.parametrize("engine", asked.ENGINES)
def test_every_engine_has_a_version_by_itself_that_can_be_planned(engine: str) -> None:
    where, facts = asked.place("h100", 1, None), asked.model(LLAMA, None, None).facts
    assert asked.engine(engine, None, where, facts)[0] == engine


def test_an_engine_that_the_card_cannot_run_says_why_and_what_does() -> None:
    assert said("make", "--model", LLAMA, "--gpu", "t4", "--engine", "sglang") == [
        "SGLang in any release on NVIDIA T4 16GB: the wheels of its kernels hold none below compute capability 8.0, "
        "though its code would accept 7.5; vLLM 0.33.0 runs on it."
    ]
    (sentence,) = said("make", "--model", LLAMA, "--gpu", "h100", "--version", "9.9")
    assert sentence.startswith("no constants of this release are known: vllm 9.9 is no release that is known")


def test_a_draft_model_of_its_own_brings_its_weights_and_kv() -> None:
    found = asked.draft("5:Qwen/Qwen2.5-0.5B-Instruct")
    # 494,032,768 parameters of two bytes; 24 layers of two KV heads of 64, K and V, two bytes.
    assert (found.tokens, found.weight_bytes, found.kv_bytes_per_token) == (5, 988_065_536, 12288)


@pytest.mark.parametrize(
    ("text", "workload"),
    [
        ("1024:512@64", Workload(Lengths(1024, 1024), Lengths(512, 512), 64)),
        ("800/16000:300/1500@8", Workload(Lengths(800, 16000), Lengths(300, 1500), 8)),
        ("1_024:1@1", Workload(Lengths(1024, 1024), Lengths(1, 1), 1)),
    ],
)
def test_a_workload_has_a_short_form(text: str, workload: Workload) -> None:
    assert asked.workload(text) == workload


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "w.json",
            '{"prompt_tokens": {"p50": 8, "p99": 16}, "output_tokens": 4, "concurrency": 2, "preemption": 0.05}',
        ),
        (
            "w.yaml",
            "workload: {prompt_tokens: {p50: 8, p99: 16}, output_tokens: {p50: 4, p99: 4}, concurrency: 2, "
            "preemption: 0.05}",
        ),
    ],
)
def test_a_workload_may_stand_in_a_file(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    assert asked.workload(str(tmp_path / name)) == Workload(Lengths(8, 16), Lengths(4, 4), 2, 0.05)


FORM = (
    "the form is PROMPT:OUTPUT@REQUESTS, lengths in tokens as P50 or P50/P99, e.g. 1024:512@64 or 800/16000:300/1500@64"
)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("1024", f"{FORM}, or a YAML or JSON file"),
        ("1024:512", f"{FORM}, or a YAML or JSON file"),
        ("a:512@64", f"'a': allowed is a whole number from 1 to 100000000; {FORM}"),
        ("0:512@64", f"'0': allowed is a whole number from 1 to 100000000; {FORM}"),
        ("1024:512@0", f"'0': allowed is a whole number from 1 to 100000; {FORM}"),
        ("1024:512@1e9", f"'1e9': allowed is a whole number from 1 to 100000; {FORM}"),
        ("16000/800:512@64", "'16000/800': p99 is below p50"),
    ],
)
def test_a_wrong_workload_is_one_sentence(text: str, why: str) -> None:
    assert said("make", "--model", LLAMA, "--gpu", "h100", "--workload", text) == [
        f"--workload = '{text}' is refused: {why}."
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"prompt_token": 1}', "prompt_token: no such key of a workload; did you mean prompt_tokens?"),
        ('{"prompt_tokens": 1}', "holds no workload: 'output_tokens' is missing; e.g. {prompt_tokens"),
        ('{"prompt_tokens": {"p50": 1}, "output_tokens": 1, "concurrency": 1}', "holds no workload: 'p99' is missing"),
        (
            '{"prompt_tokens": [1], "output_tokens": 1, "concurrency": 1}',
            "holds no workload: '[1]': allowed is a whole",
        ),
        ('{"prompt_tokens": -1, "output_tokens": 1, "concurrency": 1}', "holds no workload: '-1': allowed is a whole"),
        ('{"workload": 5}', "holds no workload"),
        ("{}", "holds no workload: 'prompt_tokens' is missing"),
    ],
)
def test_a_wrong_file_of_a_workload_is_one_sentence(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "w.json"
    path.write_text(text)
    (sentence,) = said("make", "--model", LLAMA, "--gpu", "h100", "--workload", str(path))
    assert words in sentence


@pytest.mark.parametrize(
    ("pairs", "sentence"),
    [
        (["max_num_seqs"], "--set max_num_seqs: no such setting: the form is name=value; did you mean max_num_seqs?"),
        (["max_num_sequences=1"], "--set max_num_sequences=1: no such setting; did you mean max_num_seqs?"),
        (["max_num_seqs=0"], "--set max_num_seqs=0 is refused: allowed is a whole number from 1 to 100000."),
        (["memory_fraction=1.5"], "--set memory_fraction=1.5 is refused: allowed is a number from 0.01 to 1."),
        (["enforce_eager=yes"], "--set enforce_eager=yes is refused: allowed are true and false."),
        (["kv_dtype=fp8;rm"], "--set kv_dtype=fp8;rm is refused: allowed are letters, digits and _ . -."),
        (["tp=2", "tp=4"], "--set tp=4: tp is set twice; set it once."),
        (["engine=vllm"], "--set engine=vllm: no such setting; say it with --engine."),
    ],
)
def test_a_wrong_setting_is_one_sentence(pairs: list[str], sentence: str) -> None:
    words = [word for pair in pairs for word in ("--set", pair)]
    assert said("make", "--model", LLAMA, "--gpu", "h100", *words) == [sentence]


def test_settings_take_the_spelling_of_flags() -> None:
    found = asked_settings.settings(["--gpu-memory-utilization=0.9", "enforce-eager=true", "max_model_len=4096"], 4096)
    assert found == {"memory_fraction": 0.9, "enforce_eager": True, "max_model_len": 4096}


@pytest.mark.parametrize(
    ("words", "sentences"),
    [
        (
            [],
            [
                "no model is named; name one with --model or --config.",
                "no card is named; name one with --gpu, e.g. --gpu h100-80gb-sxm.",
            ],
        ),
        (["--model", LLAMA, "--gpu", "h101"], ["no card is known as 'h101'; the nearest is h100-80gb-sxm."]),
        (
            ["--model", "meta-llama/Llama-3.1-9B-Instruct", "--gpu", "h100"],
            [
                "--model = 'meta-llama/Llama-3.1-9B-Instruct' is not in the catalog; "
                "did you mean meta-llama/Llama-3.1-8B-Instruct? Else give its config.json with --config."
            ],
        ),
        (
            ["--model", LLAMA, "--gpu", "h100", "--context", "4096", "--set", "max_model_len=8192"],
            ["--context 4096 and --set max_model_len=8192 contradict each other; say one of them."],
        ),
        (
            ["--model", LLAMA, "--gpu", "h100", "--host", "x.yml"],
            ["--host and --model, --gpu contradict each other; say one of them."],
        ),
        (
            ["--config", "/nowhere/config.json", "--gpu", "h100"],
            ["/nowhere/config.json cannot be read: No such file or directory."],
        ),
    ],
)
def test_wrong_input_is_refused_all_at_once(words: list[str], sentences: list[str]) -> None:
    assert said("make", *words) == sentences


def test_what_does_not_fit_is_refused_with_the_arithmetic(asks: list[tuple[Wish, Place]]) -> None:
    assert said("make", "--model", LLAMA, "--gpu", "t4") == [
        "deployment chat does not fit: weights 14.99 of 14.70 GiB; more GPUs."
    ]


# -------------------------------------------------------------------------------------------------- model


def test_a_model_is_a_folder_or_a_configuration(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    by_folder, by_file = asked.model(str(folder), None, None), asked.model(None, str(folder / "config.json"), None)
    assert by_folder.id == by_file.id == "tiny"
    assert by_folder.facts == by_file.facts
    assert by_folder.facts.weights_from == "config"
    assert asked.model("mine/tiny", str(folder), None).id == "mine/tiny"


def test_weights_in_the_folder_are_read_by_their_headers(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    size = asked.model(str(tmp_path), None, None).facts.weight_bytes
    header = json.dumps({"a": {"dtype": "BF16", "shape": [size // 2], "data_offsets": [0, size]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(size))
    found = asked.model(str(tmp_path), None, None).facts
    assert (found.weights_from, found.weight_bytes) == ("headers", size)
    with pytest.raises(Refusal, match=r"'awq' contradicts the weights beside .*: they are in another format; "):
        asked.model(str(tmp_path), None, "awq")
    assert asked.model(str(tmp_path), None, "bf16").facts == found
    (tmp_path / "model.safetensors").write_bytes(b"short")
    with pytest.raises(Refusal, match=r"model\.safetensors is not a whole safetensors file"):
        asked.model(str(tmp_path), None, None)


@pytest.mark.parametrize(
    "change",
    [
        {"num_hidden_layers": -1},
        {"num_hidden_layers": 10**12},
        {"hidden_size": "64"},
        {"hidden_size": None},
        {"num_attention_heads": 0},
        {"vocab_size": 1e400},
        {"torch_dtype": ["bfloat16"]},
    ],
)
def test_a_broken_configuration_is_one_sentence(tmp_path: Path, change: dict[str, Any]) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**CONFIG, **change}).replace("Infinity", "1e400"))
    result, _ = main.run(["plan", "make", "--config", str(path), "--gpu", "h100"], screen=Screen())
    (failure,) = result.failures
    assert result.exit == Exit.REFUSED
    assert failure.code == "plan.unknown_model"
    assert "\n" not in failure.sentence()


# ------------------------------------------------------------------------------------------------ showing


def test_make_shows_the_bar_and_explain_the_rest(asks: list[tuple[Wish, Place]]) -> None:
    words = ["--model", LLAMA, "--gpu", "h100"]
    made, _ = main.run(["plan", "make", *words], screen=Screen())
    explained, _ = main.run(["plan", "explain", *words], screen=Screen())
    assert "  K KV cache              55.65 GiB" in made.page
    assert "Rules of thumb" not in made.page
    assert "Rules of thumb" in explained.page
    assert explained.page.startswith(made.page)
    assert made.data == explained.data
    assert max(map(len, explained.page.splitlines())) <= 80


def test_json_holds_everything_that_the_explanation_shows(asks: list[tuple[Wish, Place]]) -> None:
    result, _ = main.run(["plan", "explain", "--model", LLAMA, "--gpu", "h100", "--json"], screen=Screen())
    (found,) = json.loads(json.dumps(result.as_dict()))["data"]["explanations"]
    assert {part["name"]: part["gib"] for part in found["bars"][0]["parts"]}["kv"] == 55.65
    for text in [found["limit"], *found["reasons"], *found["basis"], *(one["says"] for one in found["steps"])]:
        assert " ".join(text.split()) in " ".join(result.page.split())


def test_what_make_has_printed_can_be_explained_again(asks: list[tuple[Wish, Place]], tmp_path: Path) -> None:
    made, _ = main.run(["plan", "make", "--model", LLAMA, "--gpu", "h100"], screen=Screen())
    path = tmp_path / "made.json"
    path.write_text(json.dumps(made.as_dict()))
    again, _ = main.run(["plan", "explain", "--input", str(path)], screen=Screen())
    direct, _ = main.run(["plan", "explain", "--model", LLAMA, "--gpu", "h100"], screen=Screen())
    assert again.page == direct.page


def test_a_stored_plan_without_an_explanation_has_its_sentences(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"deployments": [{"name": "chat", "explain": ["weights 14.99 GiB"]}]}))
    result, _ = main.run(["plan", "explain", "--input", str(path)], screen=Screen())
    assert result.summary == "chat:\n  weights 14.99 GiB"


def test_what_a_plan_says_beside_its_explanation_is_shown(asks: list[tuple[Wish, Place]], tmp_path: Path) -> None:
    made, _ = main.run(["plan", "make", "--model", LLAMA, "--gpu", "h100"], screen=Screen())
    (found,) = made.data["explanations"]
    deployment = {"name": "chat", "explanation": found, "explain": ["simulation: a stand-in on the CPU"]}
    deployment["replicas"] = [{"index": 0, "gpus": [0], "port": 18100}]
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"deployments": [deployment]}))
    result, _ = main.run(["plan", "explain", "--input", str(path)], screen=Screen())
    assert "  - simulation: a stand-in on the CPU" in result.page.splitlines()
    assert result.data["plan"] == {"deployments": json.loads(json.dumps([deployment]))}


HOSTILE_PART = (
    '{"explanations": [{"name": "a", "title": "b", "bars": [{"title": "c", "total_gib": "x", "parts": []}]}]}'
)


@pytest.mark.parametrize(
    "text", [HOSTILE_PART, "{}", '{"deployments": 5}', '{"explanations": [1]}', '{"data": {"explanations": [{}]}}']
)
def test_a_file_that_is_no_plan_is_one_sentence(tmp_path: Path, text: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    assert said("explain", "--input", str(path)) == [
        f"{path} is not a plan; give the plan.json of a server, or what gpuready plan make --json has printed."
    ]


def test_a_server_without_a_plan_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "read_json", lambda _: None)
    assert said("explain") == [
        "this server has no plan yet; run site.yml for it, or name what is to be planned: --model and --gpu."
    ]


def test_on_a_server_what_the_engines_have_stands_beside_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = {"deployments": [{"name": "chat", "explain": ["weights 14.99 GiB"], "replicas": []}]}
    monkeypatch.setattr(plan, "read_json", lambda _: stored)
    monkeypatch.setattr(readback, "sentences", lambda layout, deployments: [f"chat: {len(deployments)} asked."])
    result, _ = main.run(["plan", "explain"], screen=Screen())
    assert result.page == "chat:\n  weights 14.99 GiB\n\nWhat the engines have\n  - chat: 1 asked."
    assert result.data["measured"] == ["chat: 1 asked."]


def test_pictures_are_written_and_named(asks: list[tuple[Wish, Place]], tmp_path: Path) -> None:
    svg, page = tmp_path / "p.svg", tmp_path / "p.html"
    words = ["--model", LLAMA, "--gpu", "h100", "--svg", str(svg), "--html", str(page)]
    result, _ = main.run(["plan", "make", *words], screen=Screen())
    assert result.page.endswith(f"{svg} is written.\n{page} is written.")
    assert svg.read_text().startswith("<svg ")
    assert page.read_text().startswith("<!doctype html>")
    assert said("make", "--model", LLAMA, "--gpu", "h100", "--svg", str(tmp_path / "no" / "p.svg")) == [
        f"{tmp_path}/no/p.svg cannot be written: No such file or directory."
    ]


def test_a_format_is_a_checkpoint_in_it_also_of_a_config_alone_but_not_against_weights(tmp_path: Path) -> None:
    assert asked.model(LLAMA, None, "fp8").facts.quantization is not None
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    found = asked.model(None, str(tmp_path / "config.json"), "awq").facts
    assert found.quantization is not None
    assert found.quantization.method == "awq"
    (unknown,) = said("make", "--model", LLAMA, "--gpu", "h100", "--quantization", "nonsense")
    assert unknown.startswith("--quantization = 'nonsense' is refused: no format is known as 'nonsense'; known are ")


# ------------------------------------------------------------------------------------ compare, recommend


@pytest.mark.parametrize(
    ("text", "key", "count"),
    [("h100", "h100-80gb-sxm", 3), ("8xh100", "h100-80gb-sxm", 8), ("rtx-pro-6000", "rtx-pro-6000-96gb", 3)],
)
def test_a_card_to_compare_brings_its_count(text: str, key: str, count: int) -> None:
    found = plan_compare.place(text, 3)
    assert (found.device.name, found.count) == (key, count)


def test_compare_takes_everything_with_everything(asks: list[tuple[Wish, Place]]) -> None:
    words = ["--model", LLAMA, "--model", "Qwen/Qwen2.5-7B-Instruct", "--gpu", "h100", "--gpu", "2xl40s", "--gpu", "t4"]
    words += ["--engine", "vllm", "--engine", "sglang", "--version", "sglang=0.5.10", "--version", "0.19.1"]
    result, _ = main.run(["plan", "compare", *words, "--rate", "h100=2400"], screen=Screen())
    rows = result.data["rows"]
    assert result.summary == "8 of 12 ways run"
    assert {(row["engine"], row["version"]) for row in rows} == {("vllm", "0.19.1"), ("sglang", "0.5.10")}
    assert {row["tokens_per_second"] for row in rows if row["card"] == "h100-80gb-sxm"} == {2400.0}
    assert {row["requests"] for row in rows if row["card"] == "t4"} == {None}
    assert "Does not run" in result.page
    assert max(map(len, result.page.splitlines())) <= 80


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "no card is named; name several with --gpu, e.g. --gpu t4 --gpu 8xh100."),
        (["--gpu", "0xh100"], "--gpu = '0xh100' is refused: the form is CARD, 8xCARD or CARD:PROFILE."),
        (["--gpu", "h100", "--version", "vlm=1"], "--version = 'vlm=1': no such engine; did you mean vllm?"),
        (
            ["--gpu", "h100", "--rate", "h1=5"],
            "gpuready plan compare: argument --rate: 'h1=5' is refused, no card is known as 'h1'; "
            "the nearest is h100-80gb-sxm; see gpuready plan compare --help.",
        ),
    ],
)
def test_a_wrong_comparison_is_one_sentence(words: list[str], sentence: str) -> None:
    assert said("compare", "--model", LLAMA, *words) == [sentence]


def test_recommend_ranks_what_serves_everything(asks: list[tuple[Wish, Place]]) -> None:
    result, _ = main.run(["plan", "recommend", "--model", LLAMA, "--engine", "vllm"], screen=Screen())
    ranked = result.data["ranked"]
    assert all(row["requests"] == 64 for row in ranked)
    # Eight GPUs are not looked at where one does.
    assert {row["count"] for row in ranked} == {1}
    assert "t4" not in {row["card"] for row in ranked}
    small = [row for row in result.data["impossible"] if row["card"] != "t4"]
    # Llama-3.1-8B in 16 bits: slices and parts of a GPU that are smaller are not even searched.
    assert any(row["shape"] == "mig" and row["count"] > 1 for row in small)
    assert {row["refusal"].partition(", and ")[0] for row in small} == {"the weights are 14.96 GiB"}
    assert "15.  " in result.page
    assert "16.  " not in result.page
    assert max(map(len, result.page.splitlines())) <= 80


def test_what_nothing_serves_says_what_is_nearest(asks: list[tuple[Wish, Place]]) -> None:
    words = ["--model", LLAMA, "--engine", "vllm", "--workload", "1024:512@1000"]
    (sentence,) = said("recommend", *words)
    assert sentence.startswith("nothing in the catalog serves 1000 requests at once: the most is 64, on ")
    assert sentence.endswith("ask for fewer requests or shorter ones, or --allow-lossy.")


def test_device_of_the_tests_is_the_catalogs() -> None:
    found = asked.place("h100", 1, None)
    assert isinstance(found.device, Device)
    assert found.device.compute == 9.0


# --------------------------------------------------------------------------------------------------- host

SHARED = Path(__file__).resolve().parents[2] / "docs" / "planner" / "h100-three-shared.yml"


def test_a_host_is_planned_from_its_variables_alone() -> None:
    result, _ = main.run(["plan", "make", "--host", str(SHARED)], screen=Screen())
    assert {one["name"] for one in result.data["explanations"]} == {"chat", "code", "moderate"}
    assert {one["name"] for one in result.data["plan"]["deployments"]} == {"chat", "code", "moderate"}
    lines = result.page.splitlines()
    assert lines[0] == "GPU 0, shared, 79.19 GiB"
    assert max(map(len, lines)) <= 80
    assert [line.partition(":")[0] for line in lines if line.startswith(("chat:", "code:", "moderate:"))] == [
        one["name"] for one in result.data["explanations"]
    ]
    # What the three take, and what is left, is the card.
    gib = sum(part["gib"] for one in result.data["explanations"] for part in one["bars"][0]["parts"] if _own(part))
    headroom = next(line for line in lines if "headroom" in line)
    assert gib + float(headroom.split()[2]) == pytest.approx(79.19, abs=0.01)


def _own(part: dict[str, Any]) -> bool:
    return part["name"] not in ("others", "headroom")


def test_a_plan_of_a_host_is_explained_again_from_its_file(tmp_path: Path) -> None:
    made, _ = main.run(["plan", "explain", "--host", str(SHARED)], screen=Screen())
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(made.data["plan"]))
    again, _ = main.run(["plan", "explain", "--input", str(path)], screen=Screen())
    assert again.page == made.page


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("workload:", "wrokload:", "h.yml:10, gpuready_deployments[0].wrokload: no such key; did you mean workload?"),
        ("h100-80gb-sxm", "h100-90gb", "h.yml:1, gpuready_gpu_model = 'h100-90gb'"),
        ("cu128", "cu127", "h.yml:3, gpuready_stack = 'cu127'"),
        ("Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen9-7B", "'Qwen/Qwen9-7B' is not in the catalog"),
        ("{shared: 0}", "{shared: 5}", "shared"),
    ],
)
def test_a_wrong_host_is_refused_with_its_line(tmp_path: Path, old: str, new: str, words: str) -> None:
    path = tmp_path / "h.yml"
    path.write_text(SHARED.read_text().replace(old, new, 1))
    assert any(words in sentence for sentence in said("make", "--host", str(path)))


def test_a_host_that_serves_nothing_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "h.json"
    path.write_text('{"gpuready_gpu_model": "t4", "gpuready_gpu_count": 1, "gpuready_stack": "cu128"}')
    assert said("make", "--host", str(path)) == [f"{path}: gpuready_deployments is empty; name what it serves."]
