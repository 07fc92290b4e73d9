"""Reads single values of a config.json that may be anything: what is not a sane size is refused in one sentence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

MOST = 1 << 24
"""No size of a model is larger, but for the context length."""
_SHOWN_CHARACTERS = 40
_SHOWN_DIGITS = 18


ALIASES: Mapping[str, tuple[str, ...]] = {
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "hidden_size": ("n_embd", "d_model", "n_embed"),
    "num_attention_heads": ("n_head", "n_heads"),
    "num_key_value_heads": ("num_kv_heads", "n_head_kv", "kv_n_heads"),
    "head_dim": ("kv_channels", "attention_head_dim"),
    "intermediate_size": ("ffn_hidden_size", "ffn_dim", "n_inner", "d_inner"),
    "vocab_size": ("padded_vocab_size",),
    "max_position_embeddings": ("n_positions", "n_ctx", "max_seq_len", "seq_length", "model_max_length"),
    "num_experts": ("num_local_experts", "n_routed_experts", "moe_num_experts"),
    "num_experts_per_tok": ("num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts"),
    "moe_intermediate_size": ("expert_intermediate_size",),
    "moe_latent_size": ("routed_expert_hidden_size",),
    "num_nextn_predict_layers": ("mtp_num_hidden_layers", "num_mtp_modules"),
}
"""Names under which older and other models keep the same size."""


class UnknownModel(ValueError):
    """A model whose config.json does not tell its sizes; the message is one sentence that names the key."""


class Missing(UnknownModel):
    """A size that config.json does not have at all."""


def shown(value: object) -> str:
    """Return a value as a message can show it: short, on one line, whatever it is."""
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, (list, tuple)):
        return f"a list of {len(value)}"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**_SHOWN_DIGITS:
        return f"a number of more than {_SHOWN_DIGITS} digits"
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return repr(value)
    text = repr(str(value)[: _SHOWN_CHARACTERS + 1])
    return text if len(str(value)) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 2]}...'"


class Fields:
    """One object of a config.json, read key by key.

    What was filled in because the object does not say it is kept, in sentences, in `assumptions`.
    """

    def __init__(self, values: Mapping[str, Any], assumptions: list[str] | None = None, where: str = "") -> None:
        self._values = values
        self._where = where
        self.assumptions: list[str] = [] if assumptions is None else assumptions

    def __contains__(self, key: str) -> bool:
        return any(self._values.get(one) is not None for one in (key, *ALIASES.get(key, ())))

    def __iter__(self) -> Iterator[str]:
        return (key for key in self._values if isinstance(key, str))

    def raw(self, key: str) -> Any:
        """Return the value as it stands there, None where there is none."""
        return self._values.get(key)

    def under(self, values: Mapping[str, Any]) -> Fields:
        """Return the same object with `values` over it."""
        return Fields({**self._values, **values}, self.assumptions, self._where)

    def assume(self, sentence: str) -> None:
        """Keep what was filled in."""
        if sentence not in self.assumptions:
            self.assumptions.append(sentence)

    def refuse(self, key: str, what: str) -> UnknownModel:
        """Return the refusal of one key's value."""
        return UnknownModel(f"config.json has {self._where}{key} = {shown(self._values.get(key))}, {what}")

    def optional(self, *keys: str, least: int = 1, most: int = MOST) -> int | None:
        """Return the first of the keys that has a value, as a whole number; None where none has.

        Raises:
            UnknownModel: when the value is not a whole number from `least` to `most`.
        """
        for key in (name for one in keys for name in (one, *ALIASES.get(one, ()))):
            value = self._values.get(key)
            if value is None:
                continue
            if isinstance(value, float) and value.is_integer():
                value = int(value)
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
                raise self.refuse(key, f"which is not a whole number from {least} to {most}")
            return value
        return None

    def number(self, *keys: str, least: int = 1, most: int = MOST) -> int:
        """Return what `optional` does.

        Raises:
            UnknownModel: also when no key has a value.
        """
        value = self.optional(*keys, least=least, most=most)
        if value is None:
            raise Missing(f"config.json has no {self._where}{' or '.join(keys)}")
        return value

    def numbers(self, key: str, least: int = 0, most: int = MOST, longest: int = 4096) -> tuple[int, ...] | None:
        """Return a list of whole numbers, None where there is none."""
        value = self._values.get(key)
        if value is None:
            return None
        if not isinstance(value, (list, tuple)) or len(value) > longest:
            raise self.refuse(key, f"which is not a list of at most {longest} whole numbers")
        for one in value:
            if isinstance(one, bool) or not isinstance(one, int) or not least <= one <= most:
                where = f"{self._where}{key}, where whole numbers from {least} to {most} stand"
                raise UnknownModel(f"config.json has {shown(one)} in {where}")
        return tuple(value)

    def flag(self, *keys: str, default: bool = False) -> bool:
        """Return the first of the keys that has a value, as true or false."""
        for key in keys:
            value = self._values.get(key)
            if value is None:
                continue
            if not isinstance(value, bool):
                raise self.refuse(key, "which is neither true nor false")
            return value
        return default

    def text(self, *keys: str, default: str = "") -> str:
        """Return the first of the keys that has a value, as text."""
        for key in keys:
            value = self._values.get(key)
            if value is None:
                continue
            if not isinstance(value, str) or len(value) > 1024:
                raise self.refuse(key, "which is not a name")
            return value
        return default

    def texts(self, key: str, longest: int = 1 << 17) -> tuple[str, ...] | None:
        """Return a list of texts, None where there is none."""
        value = self._values.get(key)
        if value is None:
            return None
        if not isinstance(value, (list, tuple)) or len(value) > longest:
            raise self.refuse(key, f"which is not a list of at most {longest} names")
        for one in value:
            if not isinstance(one, str) or len(one) > 1024:
                raise UnknownModel(f"config.json has {shown(one)} in {self._where}{key}, where names stand")
        return tuple(value)

    def below(self, key: str) -> Fields | None:
        """Return the object under a key, None where there is none."""
        value = self._values.get(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.refuse(key, "which is not an object")
        return Fields(value, self.assumptions, f"{self._where}{key}.")
