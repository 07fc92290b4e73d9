"""What a parser of arguments refuses, and what it takes otherwise than the file says."""

from __future__ import annotations

import argparse
import difflib
import importlib
import importlib.metadata
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

LONGEST = 2000
"""Characters kept of one sentence of a parser; its lists of choices can be long."""


class Refused(Exception):
    """The engine's parser said no, in these words."""


class NotChecked(Exception):
    """The engine's parser cannot run here, for this reason."""


class Report:
    """What is found wrong in a file, each once."""

    def __init__(self) -> None:
        self.refused: list[dict[str, str]] = []

    def add(self, flag: str, said: str, near: str = "") -> None:
        """Note one thing: the flag as the file spells it, what is wrong, and the nearest flag that there is."""
        if said and not any(flag and one["flag"] == flag for one in self.refused):
            self.refused.append({"flag": flag, "said": said[:LONGEST], "near": near})


def check_parsed(
    parser: argparse.ArgumentParser, parse: Callable[[], argparse.Namespace], written: Mapping[str, Any], report: Report
) -> argparse.Namespace | None:
    """Have a parser parse, and compare every value that it took with what is written; None when it refused."""

    def refuse(message: str) -> None:
        raise Refused(message)

    known = options(parser)
    vars(parser)["error"] = refuse  # its own prints the usage of two hundred options and ends the process
    try:
        found = parse()
    except (Refused, SystemExit, ValueError, TypeError, KeyError, AssertionError) as error:
        said = str(error) or type(error).__name__
        if isinstance(error, SystemExit):  # one of its options, such as help, does something else and ends
            said = f"the parser ended with exit status {error.code} before it had read all"
        flag = flag_in(said, written)
        report.add(flag, said, "" if f"--{dashed(flag)}" in known else nearest(flag, known))
        found = None
    for name, value in written.items():
        report.add(name, *_unknown(name, known))
        if found is not None:
            report.add(name, _difference(name, value, found, known))
    return found


def check_apart(arguments: Iterable[str], written: Mapping[str, Any], report: Report) -> None:
    """Refuse what stands in the file and on the command line: which of them wins differs from release to release."""
    given = {dashed(word.partition("=")[0]) for word in arguments if word.startswith("--")}
    for name in written:
        if dashed(name) in given:
            report.add(name, "it stands on the command line, where each replica has its own")


def options(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """Return a parser's long options by their spelling with dashes."""
    # Not those of its actions, which hide what they take for compatibility.
    known = parser._option_string_actions
    return {f"--{dashed(text)}": action for text, action in known.items() if text.startswith("--")}


def dashed(name: str) -> str:
    """Return a name as the engines' parsers read it: with dashes, which below its first dot stand as they are."""
    first, dot, below = name.lstrip("-").partition(".")
    return first.replace("_", "-") + dot + below


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the nearest name that there is, without leading dashes; empty where none is near."""
    found = difflib.get_close_matches(dashed(name).split(".")[0], [one.lstrip("-") for one in known], n=1, cutoff=0.6)
    return found[0] if found else ""


def flag_in(said: str, written: Mapping[str, Any]) -> str:
    """Return the flag of the file that a sentence is about; empty where it names none of them."""
    spelled = {dashed(name): name for name in written}
    for name in re.findall(r"(?<![\w-])(?:--?|[\"'`])([A-Za-z][\w.-]*)", said):
        if dashed(name) in spelled:
            return spelled[dashed(name)]
    words = set(re.findall(r"\w+", said.replace("-", "_")))
    named = (name for name in written if re.search("[-_]", name) and name.replace("-", "_") in words)
    left_over = set(said.removeprefix("unrecognized arguments: ").split()) if "unrecognized" in said else set()
    valued = (name for name, value in written.items() if left_over & set(_texts(value)))
    return next(named, next(valued, ""))


def _texts(value: Any) -> list[str]:
    """Return the words that a value of the file becomes on a command line."""
    return [str(one) for one in value] if isinstance(value, list) else [str(value)]


def _unknown(name: str, known: Mapping[str, argparse.Action]) -> tuple[str, str]:
    """Return what is wrong with a name that is none of the parser's, and the nearest; empty where it is one."""
    option = f"--{dashed(name)}".partition(".")[0]
    if option in known:
        return "", ""
    longer = [one for one in known if one.startswith(option)]
    if longer:
        return f"the parser takes it for {longer[0]}, of which it is the beginning", longer[0].lstrip("-")
    return "the engine's parser has no such option", nearest(name, known)


def _difference(name: str, value: Any, found: argparse.Namespace, known: Mapping[str, argparse.Action]) -> str:
    """Return in which way a parser took another value than the file's; empty where it is the same."""
    option, _, below = f"--{dashed(name)}".partition(".")
    action = known.get(option)
    if action is None:
        return ""
    taken = getattr(found, action.dest, None)
    if below:
        same = says_the_same(value, deep(taken, below))
    elif isinstance(value, bool):
        same = _is_switched(value, option, action, taken)
    elif value is None or value == []:
        same = taken == value
    else:
        same = says_the_same(value, taken) or _is_converted(value, action, taken)
    return "" if same else f"the file says {shown(value)}, and the engine's parser took {shown(taken)}"


def _is_switched(value: bool, option: str, action: argparse.Action, taken: Any) -> bool:
    """Return whether a switch stands as the file has it: parsers skip what is false."""
    if isinstance(taken, bool):
        negative = getattr(action, "negative_option_strings", None)  # vLLM's own, from 0.33 on
        off = option in negative if negative else option.startswith("--no-")
        off = off or (action.nargs == 0 and action.const is False)
        return taken is (value is not off)
    return bool(action.nargs == 0 and value and taken == action.const) or str(taken).lower() == str(value).lower()


def _is_converted(value: Any, action: argparse.Action, taken: Any) -> bool:
    """Return whether a value is what the option's own conversion makes of the text in the file."""
    convert = action.type if callable(action.type) else str
    try:
        made = [convert(text) for text in _texts(value)]
    except (ValueError, TypeError, argparse.ArgumentTypeError):
        return False
    return bool(taken == made or (len(made) == 1 and taken == made[0]))


def deep(value: Any, path: str) -> Any:
    """Return what lies at a dotted path of mappings and records; None where nothing does."""
    for part in path.split("."):
        value = value.get(part) if isinstance(value, Mapping) else getattr(value, part, None)
    return value


def says_the_same(one: Any, other: Any) -> bool:
    """Return whether two values say the same: as they are, as text, as a number, or one being the JSON of the other."""
    if one == other or str(one) == str(other):
        return True
    if isinstance(one, (int, float)) and isinstance(other, (int, float)):
        return math.isclose(one, other)
    try:
        return isinstance(one, str) and bool(json.loads(one) == other)
    except ValueError:
        return False


def shown(value: Any) -> str:
    """Return a value for a sentence, short."""
    return repr(value)[:200]


def first_of(*names: str) -> Any:
    """Return the first of `module:attribute` that this release of the engine has.

    Raises:
        NotChecked: when it has none of them.
    """
    for name in names:
        module, _, attribute = name.partition(":")
        try:
            return getattr(importlib.import_module(module), attribute)
        except ModuleNotFoundError as error:
            if not error.name or not module.startswith(error.name):
                raise
        except AttributeError:
            continue
    raise NotChecked(f"this release of the engine has none of {', '.join(names)}")


def sentences(error: Exception) -> list[tuple[str, str]]:
    """Return what an error says, each sentence with the field that it is about; pydantic's has several."""
    errors = getattr(error, "errors", None)
    if not callable(errors):
        return [("", str(error) or type(error).__name__)]
    return [(".".join(str(part) for part in one["loc"]), one["msg"]) for one in errors()]


def version_of(*distributions: str) -> str:
    """Return the version of the first of these that is installed."""
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown"
