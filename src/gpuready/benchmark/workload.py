"""The prompts: unique, so that no prefix cache helps, and the same again for the same seed."""

from __future__ import annotations

import random
from dataclasses import dataclass

# Short English words: most are one token in the vocabularies of today's models. How many they really are, the server's
# usage says.
_TEXT = """
able air all arm art ask back bad bag ball bank base bed bell best big bird black blue board boat body bone book both
box boy brain bread brown burn bus busy buy cake call camp car card care case cat chair child city class clean clear
clock cloud coat cold cook cool corn cost count cow cross cup cut dark day deal deep desk dish dog door down draw
dream dress drink drive dry dust ear earth east easy edge egg end eye face fact fall farm fast fear feed feel field
fill film find fire fish five flag flat floor fly food foot forest form four free fresh friend front fruit full game
garden gate gift girl give glass gold good grass gray green ground group grow hair half hall hand hard hat head hear
heart heat help high hill hit hold hole home hope horse hot hour house ice idea iron island jump keep key kind king
knee knife lake lamp land large last late law leaf learn left leg lemon letter light line lion lip list long look
love low lunch map mark meal meat metal milk mind moon month mouth music name neck need nest new night nine north nose
note ocean oil old one open orange page paint paper park part path pen person picture pig plane plant plate play point
pool port post pot rain read red rest rice rich ring river road rock roof room root rose round rule run sail salt sand
school sea seat seed sell send seven shape sheep ship shoe shop short show side sign silk sing six size skin sky sleep
small smoke snow soap soft song soup south space speak spoon spring square star stone storm story street strong sugar
summer sun table tail talk tall tea ten test thick thin three time tooth top town train tree truck two under valley
voice walk wall warm wash water wave way wear week west wheel white wide wind window wine wing winter wolf wood word
work world year yellow young zero
"""
_WORDS = _TEXT.split()
FALLBACK_TOKENS_PER_WORD = 1.3


@dataclass(frozen=True)
class Workload:
    """What is asked of the server, the same for every request but for the words."""

    seed: int
    words: int
    """Words of a prompt that come to the wanted number of tokens, by calibration."""
    output_tokens: int

    def prompt(self, purpose: str, index: int) -> str:
        """Return the prompt of one request; `purpose` (the level, a warm-up) keeps those of one run apart."""
        return prompt(self.seed, f"{purpose}/{index}", self.words)


def prompt(seed: int, name: str, words: int) -> str:
    """Return a prompt of random words. Prompts of other seeds or names differ from their first words on."""
    chosen = random.Random(f"{seed}/{name}").choices(_WORDS, k=words)  # noqa: S311 - a workload, not a secret
    return " ".join(chosen)


@dataclass(frozen=True)
class Calibration:
    """How many tokens the server counts: `overhead_tokens` for the chat template, and some for each word."""

    tokens_per_word: float
    overhead_tokens: float
    measured: bool
    """False where the server reports no usage, so that usual values stand in."""

    def words_for(self, prompt_tokens: int) -> int:
        """Return the words whose prompt comes nearest to a number of tokens, at least one."""
        return max(1, round((prompt_tokens - self.overhead_tokens) / self.tokens_per_word))


def calibrate(probes: list[tuple[int, int | None]]) -> Calibration:
    """Fit a line through two probes, each words and the prompt tokens that the server reported for them."""
    (few, few_tokens), (many, many_tokens) = probes
    if few_tokens is None or many_tokens is None or many_tokens <= few_tokens or many <= few:
        return Calibration(FALLBACK_TOKENS_PER_WORD, 0.0, measured=False)
    slope = (many_tokens - few_tokens) / (many - few)
    return Calibration(round(slope, 4), round(max(0.0, few_tokens - slope * few), 2), measured=True)
