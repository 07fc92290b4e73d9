"""The page of claims on GPU memory, engines, cards and cost: what is said, and what is to be said of it, in figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from gpuready import catalog
from gpuready.planning import claims

_HEAD = """\
# Claims about GPU memory, and what holds

<!-- Made by `gpuready spec docs` from src/gpuready/catalog/claims.yaml; a change belongs there. -->

gpuready began with an article of a hosting company on fragmentation of GPU memory in LLM inference. This page lists
what it claims of memory, engines, cards and cost, in our words, with a verdict and the evidence for it. Figures are
recomputed by the planner, for vLLM 0.19.1 with its defaults unless said otherwise, by the function of
[planning/claims.py](../src/gpuready/planning/claims.py) that stands beside the verdict. Where a claim does not hold,
gpuready does not act as if it did. GB are 10^9 bytes, as in the article; GiB are 2^30. 32K are 32,768 tokens.
"""


def page() -> str:
    """Return the page as Markdown, every figure computed anew."""
    found = catalog.load("claims")
    parts = [_HEAD, _verdicts(found)]
    for topic, title in found["topics"].items():
        parts.append(f"## {title}\n")
        parts += [_section(claim) for claim in found["claims"] if claim["topic"] == topic]
    return "\n".join(parts)


def evidence(claim: Mapping[str, Any]) -> str:
    """Return what is said of a claim, with its figures filled in."""
    figures = getattr(claims, claim["function"])() if "function" in claim else {}
    return str(claim["evidence"]).format(**figures)


def _verdicts(found: Mapping[str, Any]) -> str:
    count = Counter(claim["verdict"] for claim in found["claims"])
    rows = [f"| {verdict} | {count[verdict]} | {meaning} |" for verdict, meaning in found["verdicts"].items()]
    return "\n".join(["| verdict | claims | which means |", "|---|---:|---|", *rows, ""])


def _section(claim: Mapping[str, Any]) -> str:
    by = f" (`{claim['function']}`)" if "function" in claim else ""
    return f"### {claim['id']}\n\n> {claim['claim']}\n\n**{claim['verdict'].capitalize()}**{by}. {evidence(claim)}\n"
