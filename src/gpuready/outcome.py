"""What every command returns and how every refusal is said.

The shapes are a contract: Ansible, people and scripts read the same JSON,
`{changed, summary, diff, undecided, failures: [{code, what, why, fix}]}`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from enum import IntEnum
from typing import Any

_CREDENTIALS = re.compile(r"""(\w[\w+.-]*://)(?:[^\s/'"<>]+|[^\s/:'"<>]+:(?!\d+/)[^\s'"<>]+)@""")
"""In an address: all before the @ of its host, also where a password holds what an address must not hold."""


def mask(text: str) -> str:
    """Return a text with *** for the credentials that an address in it may carry."""
    return _CREDENTIALS.sub(r"\1***@", text) if "://" in text else text


def masked(value: Any) -> Any:
    """Return data with every text in it masked."""
    if isinstance(value, str):
        return mask(value)
    if isinstance(value, dict):
        return {key: masked(one) for key, one in value.items()}
    return [masked(one) for one in value] if isinstance(value, (list, tuple)) else value


class Exit(IntEnum):
    """Exit codes of the command line."""

    DONE = 0
    """Done; with `--check`, also when changes are pending."""
    VERIFY_NO = 1
    """A verifying verb says no."""
    REFUSED = 2
    """Refused input; nothing was changed."""
    MACHINE_CANNOT = 3
    """The machine cannot: no driver, no permission."""
    FAILED = 4
    """Tried and failed; the message says which state the machine is in now."""


def visible(text: str) -> str:
    """Return a text on one line, with everything that a terminal would act on, or not show, as an escape.

    Parts of a sentence come from files and servers: a control character, a change of direction or a character of no
    width in them could make it read as something else.
    """
    line = " ".join(text.split("\n"))
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in line)


@dataclass(frozen=True)
class Failure:
    """One thing that is wrong.

    `code` is stable and for machines; `what` names host, file, key and value; `why` says what makes
    it wrong; `fix` says what is allowed or what to do next.
    """

    code: str
    what: str
    why: str = ""
    fix: str = ""

    def sentence(self) -> str:
        """Return the failure as the one sentence that an operator reads."""
        text = self.what if not self.why else f"{self.what}: {self.why}"
        text = visible(mask(f"{text}; {self.fix}" if self.fix else text))
        return text if text.endswith("?") else f"{text}."


@dataclass(frozen=True)
class Change:
    """One difference between now and wanted, in the shape that Ansible prints as a diff."""

    header: str
    before: str
    after: str

    def as_ansible(self) -> dict[str, str]:
        """Return the change as one entry of Ansible's `diff` list."""
        return {
            "before_header": self.header,
            "after_header": self.header,
            "before": self.before,
            "after": self.after,
        }


@dataclass
class Result:
    """What a command did, or would do under `--check`."""

    changed: bool = False
    summary: str = ""
    diff: list[Change] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    undecided: list[str] = field(default_factory=list)
    """What `--check` cannot know yet, because it depends on something that would be installed first."""
    data: dict[str, Any] = field(default_factory=dict)
    """What a reading verb was asked for, e.g. the facts."""
    page: str = ""
    """What people read in place of the summary, laid out for their terminal; it is no part of the JSON."""
    bare: bool = False
    """The JSON is the data alone, because its form is a contract of its own; failures have the form of all commands."""
    exit: Exit = Exit.DONE

    def include(self, other: Result) -> None:
        """Add what another step of the same command did; its data stays its own."""
        self.changed = self.changed or other.changed
        self.diff += other.diff
        self.undecided += other.undecided
        self.failures += other.failures

    @contextmanager
    def kept_by_failures(self, check: bool) -> Iterator[None]:
        """Have a refusal from inside carry what was done before it; then it is no longer one that changed nothing."""
        try:
            yield
        except Refusal as refusal:
            if self.changed:
                refusal.done = self
                if refusal.exit == Exit.REFUSED and not check:
                    refusal.exit = Exit.FAILED
            raise

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON contract of every command; what is shown of it has no credentials in its addresses.

        `data` is exact: the caller reads it back, and a masked address would be taken for the real one.
        """
        shown: dict[str, Any] = masked(
            {
                "changed": self.changed,
                "summary": self.summary,
                "diff": [change.as_ansible() for change in self.diff],
                "undecided": self.undecided,
                "failures": [asdict(failure) for failure in self.failures],
            }
        )
        return {**shown, "data": self.data}


class Refusal(Exception):
    """Input that is refused before the first change, with every reason at once."""

    exit = Exit.REFUSED
    done: Result | None = None
    """What the command had done before; None where nothing was."""

    def __init__(self, failures: Failure | Iterable[Failure]) -> None:
        self.failures: list[Failure] = [failures] if isinstance(failures, Failure) else list(failures)
        super().__init__(" ".join(failure.sentence() for failure in self.failures))


class MachineCannot(Refusal):
    """The machine lacks what the command needs (a driver, a permission)."""

    exit = Exit.MACHINE_CANNOT


class Busy(MachineCannot):
    """Somebody else is at work on the machine; whoever asked may ask again for `wait_seconds`."""

    def __init__(self, failures: Failure | Iterable[Failure], wait_seconds: int) -> None:
        super().__init__(failures)
        self.wait_seconds = wait_seconds


class Failed(Refusal):
    """Tried and failed; the failures say which state the machine is in now."""

    exit = Exit.FAILED
