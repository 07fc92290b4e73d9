#!/usr/bin/env python3
"""Makes the simulation's model: a tiny Qwen2 with random weights, from the standard library alone.

    python3 sim/tiny_model.py OUT                 into the folder OUT
    python3 sim/tiny_model.py --store DIR MODEL   into DIR/<name>@<revision>; prints that path
    python3 sim/tiny_model.py --bundle MODEL      as one JSON object on stdout: file name to base64

A real engine loads and serves it; its words are nonsense, printable, and the same everywhere: the weights
come from a fixed seed, so the revision (a digest of the content) is the same on every machine. It never
ends a text by itself: the client's max_tokens does, so a stream is as long as a test wants it.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import random
import shutil
import struct
import sys
import tempfile
from array import array
from collections.abc import Callable
from pathlib import Path

MODEL = "gpuready-sim/tiny-qwen2"
LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, CONTEXT = 2, 128, 256, 4, 2, 32768
HEAD = HIDDEN // HEADS
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIALS = [PAD, START, END]
PRINTABLE = range(0x20, 0x7F)
# One hidden number is the same for every token and never touched by a layer: the head turns it into a bias
# that no unprintable token can overcome.
CONSTANT = 0
_BIAS = -60.0
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_alphabet() -> list[str]:
    """Return the character that stands for each byte in a byte-level vocabulary, as GPT-2 laid it down."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in own else chr(next(others)) for byte in range(256)]


def tokenizer() -> dict[str, object]:
    """Return tokenizer.json: one token per byte, no merges, and the special tokens."""
    vocabulary = {char: number for number, char in enumerate(byte_alphabet())}
    added = [
        {
            "id": 256 + number,
            "content": text,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for number, text in enumerate(SPECIALS)
    ]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": vocabulary,
            "merges": [],
        },
    }


def _ids() -> dict[str, int]:
    return {"bos_token_id": 256 + SPECIALS.index(PAD), "eos_token_id": 256 + SPECIALS.index(END)}


def _jsons() -> dict[str, dict[str, object]]:
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": 256 + len(SPECIALS),
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "hidden_act": "silu",
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "torch_dtype": "bfloat16",
        **_ids(),
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": CONTEXT,
        "clean_up_tokenization_spaces": False,
        "pad_token": PAD,
        "eos_token": END,
        "additional_special_tokens": [START],
        "chat_template": _CHAT_TEMPLATE,
    }
    return {
        "config.json": config,
        "generation_config.json": {**_ids(), "pad_token_id": _ids()["bos_token_id"], "do_sample": False},
        "tokenizer.json": tokenizer(),
        "tokenizer_config.json": settings,
    }


def _weights() -> dict[str, tuple[list[int], list[float]]]:
    """Return every tensor by name: its shape and its numbers, row by row."""
    # A fixed seed is the point: the model must be the same on every machine.
    chance = random.Random(20_240_412)  # noqa: S311
    found: dict[str, tuple[list[int], list[float]]] = {}

    def matrix(name: str, rows: int, columns: int, size: float, cell: Callable[[int, int], float | None]) -> None:
        numbers = [chance.uniform(-size, size) for _ in range(rows * columns)]
        for row in range(rows):
            for column in range(columns):
                fixed = cell(row, column)
                if fixed is not None:
                    numbers[row * columns + column] = fixed
        found[name] = ([rows, columns], numbers)

    def free(_row: int, _column: int) -> None:
        return None

    def untouched(row: int, _column: int) -> float | None:
        return 0.0 if row == CONSTANT else None

    def head(row: int, column: int) -> float | None:
        if column == CONSTANT:
            return 0.0 if row in PRINTABLE else _BIAS
        return None if row in PRINTABLE else 0.0

    vocabulary = 256 + len(SPECIALS)
    matrix("model.embed_tokens.weight", vocabulary, HIDDEN, 1.0, lambda _, column: 1.0 if column == CONSTANT else None)
    for layer in range(LAYERS):
        base = f"model.layers.{layer}."
        for part, rows in (("q", HIDDEN), ("k", KV_HEADS * HEAD), ("v", KV_HEADS * HEAD)):
            matrix(f"{base}self_attn.{part}_proj.weight", rows, HIDDEN, 0.3, free)
            found[f"{base}self_attn.{part}_proj.bias"] = ([rows], [0.0] * rows)
        matrix(f"{base}self_attn.o_proj.weight", HIDDEN, HIDDEN, 0.2, untouched)
        matrix(f"{base}mlp.gate_proj.weight", INNER, HIDDEN, 0.2, free)
        matrix(f"{base}mlp.up_proj.weight", INNER, HIDDEN, 0.2, free)
        matrix(f"{base}mlp.down_proj.weight", HIDDEN, INNER, 0.2, untouched)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            found[f"{base}{norm}.weight"] = ([HIDDEN], [1.0] * HIDDEN)
    found["model.norm.weight"] = ([HIDDEN], [1.0] * HIDDEN)
    matrix("lm_head.weight", vocabulary, HIDDEN, 0.4, head)
    return found


def _bfloat16(numbers: list[float]) -> bytes:
    """Return numbers as bfloat16: the upper half of a 32-bit float, cut off."""
    floats = array("f", numbers)
    if sys.byteorder == "big":
        floats.byteswap()
    raw = floats.tobytes()
    halves = bytearray(len(raw) // 2)
    halves[0::2], halves[1::2] = raw[2::4], raw[3::4]
    return bytes(halves)


def _safetensors() -> bytes:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    body = bytearray()
    for name, (shape, numbers) in sorted(_weights().items()):
        data = _bfloat16(numbers)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [len(body), len(body) + len(data)]}
        body += data
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + bytes(body)


def files() -> dict[str, bytes]:
    """Return the whole model: content by file name."""
    texts = {name: json.dumps(value, indent=2, ensure_ascii=True) + "\n" for name, value in _jsons().items()}
    return {**{name: text.encode() for name, text in texts.items()}, "model.safetensors": _safetensors()}


def revision(content: dict[str, bytes]) -> str:
    """Return the model's revision: 12 digits of a digest of all names and contents."""
    digest = hashlib.sha256()
    for name, data in sorted(content.items()):
        digest.update(f"{name}\0{hashlib.sha256(data).hexdigest()}\n".encode())
    return digest.hexdigest()[:12]


def write(content: dict[str, bytes], folder: Path) -> None:
    """Write a model into a folder, whole or not at all; what is there already stays."""
    if folder.is_dir():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".new-"))
    try:
        for name, data in content.items():
            beside.joinpath(name).write_bytes(data)
        beside.chmod(0o755)
        beside.rename(folder)
    except OSError:
        # Another run was faster: its model is the same.
        if not folder.is_dir():
            raise
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def main() -> int:
    """Make the model where it is asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", metavar="OUT|MODEL", help=f"a folder; with --store or --bundle the model's id, {MODEL}")
    parser.add_argument("--store", metavar="DIR", type=Path, help="write into DIR/<name>@<revision>")
    parser.add_argument("--bundle", action="store_true", help="print file names and base64 contents as JSON")
    asked = parser.parse_args()
    if (asked.store or asked.bundle) and asked.out != MODEL:
        print(f"sim/tiny_model.py: model {asked.out!r} is not known; there is {MODEL}.", file=sys.stderr)
        return 2
    content = files()
    if asked.bundle:
        print(json.dumps({name: base64.b64encode(data).decode() for name, data in content.items()}))
        return 0
    folder = Path(asked.out)
    if asked.store:
        folder = asked.store / f"{MODEL.replace('/', '--')}@{revision(content)}"
    write(content, folder)
    print(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
