"""`gpuready NOUN VERB`: finds the noun's file, runs the verb, prints the result.

A noun's file offers `VERBS`, a dict of verb to `Verb`. Input is one JSON object on stdin (never argv:
it may hold secrets and is large); the result is the JSON contract of `gpuready.outcome`.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import sys
from dataclasses import replace
from typing import Any

from gpuready import __version__
from gpuready.cli.environment import own_environment
from gpuready.cli.verb import Call, Verb
from gpuready.outcome import Busy, Exit, Failure, Refusal, Result, masked
from gpuready.serving import turn

NOUNS: dict[str, str] = {
    "agent": "this server part itself: install",
    "facts": "what this server is: GPUs, host, models, what runs",
    "host": "settings of the host: kernel parameters, firewall",
    "engine": "inference engines: build, list",
    "model": "models on disk: check, list",
    "plan": "what fits and why: explain",
    "gateway": "the only door to the engines: apply",
    "release": "rendered deployments: apply, list",
    "deployment": "running deployments: status, and the steps of their units",
    "spec": "what an operator declares: check, schema, docs (controller only)",
}


def _verbs(noun: str) -> dict[str, Verb]:
    """Return the verbs of a noun; only the noun's own file is imported."""
    module = importlib.import_module(f"gpuready.cli.{noun}")
    verbs: dict[str, Verb] = module.VERBS
    return verbs


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gpuready",
        description="Takes a bare GPU server, makes it serve language models, and keeps it that way.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    nouns = parser.add_subparsers(dest="noun", metavar="NOUN", required=True)
    for noun, text in NOUNS.items():
        nouns.add_parser(noun, help=text, add_help=False)
    return parser


def _verb_parser(noun: str, verbs: dict[str, Verb]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"gpuready {noun}", description=NOUNS[noun])
    sub = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for name, verb in verbs.items():
        one = sub.add_parser(name, help=verb.help, description=verb.help)
        one.add_argument("--json", action="store_true", help="print the result as one JSON object")
        # A reading verb takes it too, so that a caller in check mode need not know which verbs read.
        check_help = "say what would change, change nothing" if verb.changes else argparse.SUPPRESS
        one.add_argument("--check", action="store_true", help=check_help)
        if verb.takes_input:
            one.add_argument("--input", metavar="FILE", help="read the input from FILE; - or nothing: stdin")
        for argument in verb.arguments:
            one.add_argument(argument, metavar=argument.upper())
    return parser


def _read_input(source: str | None) -> dict[str, Any]:
    """Read the JSON object that a verb takes; an empty stdin is an empty object."""
    where = "standard input" if source in (None, "-") else str(source)
    try:
        if source in (None, "-"):
            text = "" if sys.stdin is None or sys.stdin.isatty() else sys.stdin.read()
        else:
            with open(str(source), encoding="utf-8") as file:  # noqa: PTH123 - the path is the operator's
                text = file.read()
        value = json.loads(text) if text.strip() else {}
    except OSError as error:
        problem = Failure("input.unreadable", f"{where} cannot be read", str(error.strerror))
        raise Refusal(problem) from error
    except ValueError as error:
        raise Refusal(Failure("input.not_json", f"{where} is not JSON", str(error))) from error
    if not isinstance(value, dict):
        raise Refusal(Failure("input.not_object", f"{where} is not a JSON object"))
    return value


def _print_for_people(result: Result) -> None:
    shown = result.as_dict()
    for change in shown["diff"]:
        print(f"--- {change['before_header']}")
        for sign, text in (("-", change["before"]), ("+", change["after"])):
            for line in text.splitlines():
                print(f"{sign}{line}")
    if result.data and not result.summary:
        print(json.dumps(masked(shown["data"]), indent=2, sort_keys=True))
    for what in shown["undecided"]:
        print(f"decided after install: {what}")
    if result.summary:
        print(shown["summary"])
    for failure in result.failures:
        print(f"{failure.code}: {failure.sentence()}", file=sys.stderr)


def run(argv: list[str]) -> tuple[Result, bool]:
    """Run one command; return its result and whether it is to be printed as JSON."""
    known, rest = _parser().parse_known_args(argv)
    verbs = _verbs(known.noun)
    options = vars(_verb_parser(known.noun, verbs).parse_args(rest))
    verb = verbs[options["verb"]]
    as_json = bool(options["json"])
    try:
        given = _read_input(options.get("input")) if verb.takes_input else {}
        own_environment(os.environ, given.pop("proxy", None))
        call = Call(
            input=given,
            arguments=[options[name] for name in verb.arguments],
            check=bool(options.get("check")),
        )
        changes = verb.changes and not call.check
        with turn.taken(f"gpuready {known.noun} {options['verb']}") if changes else contextlib.nullcontext():
            return verb.run(call), as_json
    except Busy as busy:
        data = {"wait_seconds": busy.wait_seconds}
        return Result(failures=busy.failures, exit=busy.exit, data=data), as_json
    except Refusal as refusal:
        done = refusal.done or Result()
        return replace(done, failures=refusal.failures, exit=refusal.exit, data={}), as_json
    except PermissionError as error:
        what = f"{error.filename or 'something'} may not be touched"
        failure = Failure("machine.permission", what, str(error.strerror), "run as root")
        return Result(failures=[failure], exit=Exit.MACHINE_CANNOT), as_json
    except OSError as error:
        what = f"{error.filename}" if error.filename else f"gpuready {known.noun} {options['verb']}"
        failure = Failure(
            "machine.io",
            f"{what}: {error.strerror or error}",
            "",
            "run the command again once that is repaired",
        )
        return Result(failures=[failure], exit=Exit.FAILED), as_json


def main(argv: list[str] | None = None) -> int:
    """Entry point of the console script and of the zipapp."""
    try:
        result, as_json = run(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt:
        print("interrupted; run the command again to finish", file=sys.stderr)
        return 130
    except Exception as error:
        # A defect of ours: the operator gets a sentence, and the trace where it was asked for.
        if os.environ.get("GPUREADY_TRACE"):
            raise
        what = f"gpuready has a defect: {type(error).__name__}: {error}"
        failure = Failure("internal", what, "", "set GPUREADY_TRACE=1, run it again and report what it prints")
        result, as_json = Result(failures=[failure], exit=Exit.FAILED), "--json" in (argv or sys.argv)
    if as_json:
        json.dump(result.as_dict(), sys.stdout)
        print()
    else:
        _print_for_people(result)
    return int(result.exit)


if __name__ == "__main__":
    sys.exit(main())
