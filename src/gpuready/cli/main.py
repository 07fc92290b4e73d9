"""`gpuready NOUN VERB`: finds the noun's file, runs the verb, prints the result.

A noun's file offers `VERBS`, a dict of verb to `Verb`. Input is one JSON object on stdin (never argv:
it may hold secrets and is large); the result is the JSON contract of `gpuready.outcome`.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib
import io
import json
import os
import sys
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NoReturn

from gpuready import __version__
from gpuready.cli.environment import own_environment
from gpuready.cli.reading import object_of
from gpuready.cli.screen import Screen
from gpuready.cli.verb import Call, Option, Verb
from gpuready.outcome import Busy, Exit, Failure, Refusal, Result, masked
from gpuready.serving import turn

NOUNS: dict[str, str] = {
    "agent": "this server part itself: install",
    "facts": "what this server is: GPUs, host, models, what runs",
    "host": "settings of the host: kernel parameters, firewall",
    "engine": "inference engines: build, list",
    "model": "models on disk: check, list",
    "plan": "what fits on which card and why: make, explain, compare, recommend, backtest",
    "gateway": "the only door to the engines: apply",
    "release": "rendered deployments: apply, list",
    "deployment": "running deployments: status, and the steps of their units",
    "memory": "what became of GPU and host memory: diagnose",
    "spec": "what an operator declares: check, schema, docs (controller only)",
    "completion": "completion of this command line: bash, zsh",
}


def _verbs(noun: str) -> dict[str, Verb]:
    """Return the verbs of a noun; only the noun's own file is imported."""
    module = importlib.import_module(f"gpuready.cli.{noun}")
    verbs: dict[str, Verb] = module.VERBS
    return verbs


class _Parser(argparse.ArgumentParser):
    """Refuses a command line as every other input is refused: in one sentence."""

    def error(self, message: str) -> NoReturn:
        """Raise the refusal."""
        raise Refusal(Failure("command.line", f"{self.prog}: {message}", "", f"see {self.prog} --help"))


def _nearest(said: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(said, list(known), n=1)
    return f"did you mean {near[0]}?" if near else f"there is {', '.join(known)}"


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="gpuready",
        description="Takes a bare GPU server, makes it serve language models, and keeps it that way.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=__version__)
    nouns = parser.add_subparsers(dest="noun", metavar="NOUN", required=True)
    for noun, text in NOUNS.items():
        nouns.add_parser(noun, help=text, add_help=False)
    return parser


def _verb_parser(noun: str, verbs: dict[str, Verb]) -> argparse.ArgumentParser:
    parser = _Parser(prog=f"gpuready {noun}", description=NOUNS[noun], allow_abbrev=False)
    sub = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for name, verb in verbs.items():
        one = sub.add_parser(
            name,
            help=verb.help,
            description=verb.help,
            epilog=verb.more or None,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        for argument in verb.arguments:
            one.add_argument(argument, metavar=argument.upper())
        if verb.optional_argument:
            one.add_argument(verb.optional_argument, nargs="?", metavar=verb.optional_argument.upper())
        for option in verb.options:
            _add_option(one, option)
        if verb.takes_input:
            one.add_argument("--input", metavar="FILE", help="read the input from FILE; - or nothing: stdin")
        one.add_argument("--json", action="store_true", help="print the result as one JSON object")
        # A reading verb takes it too, so that a caller in check mode need not know which verbs read.
        check_help = "say what would change, change nothing" if verb.changes else argparse.SUPPRESS
        one.add_argument("--check", action="store_true", help=check_help)
    return parser


def _add_option(parser: argparse.ArgumentParser, option: Option) -> None:
    flag = f"--{option.name}"
    if not option.metavar:
        parser.add_argument(flag, dest=option.key, action="store_true", help=option.help)
        return

    def read(text: str) -> Any:
        allowed = option.choices() if option.choices else None
        if allowed is not None and text not in allowed:
            raise argparse.ArgumentTypeError(f"{text!r} is refused, {_nearest(text, allowed)}")
        try:
            return option.kind(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r} is refused, {error}") from error

    parser.add_argument(
        flag,
        dest=option.key,
        metavar=option.metavar,
        type=read,
        # A list as the default would be shared by all calls.
        default=option.default,
        action="append" if option.repeatable else "store",
        help=option.help,
    )


def _parse(argv: list[str]) -> tuple[str, Verb, dict[str, Any]]:
    """Return noun, verb and options of a command line; what is misspelled is refused with the nearest."""
    said = [word for word in argv if not word.startswith("-")]
    if argv and argv[:1] == said[:1] and said[0] not in NOUNS:
        raise Refusal(Failure("command.line", f"gpuready {said[0]}: no such noun", "", _nearest(said[0], NOUNS)))
    known, rest = _parser().parse_known_args(argv)
    verbs = _verbs(known.noun)
    if rest and not rest[0].startswith("-") and rest[0] not in verbs:
        what = f"gpuready {known.noun} {rest[0]}: no such verb"
        raise Refusal(Failure("command.line", what, "", _nearest(rest[0], verbs)))
    options, unknown = _verb_parser(known.noun, verbs).parse_known_args(rest)
    verb = verbs[options.verb]
    if unknown:
        what = f"gpuready {known.noun} {options.verb}: {unknown[0].partition('=')[0]} is not taken here"
        flags = [f"--{option.name}" for option in verb.options] + ["--json"]
        near = difflib.get_close_matches(unknown[0].partition("=")[0], flags, n=1)
        fix = f"did you mean {near[0]}?" if near else f"see gpuready {known.noun} {options.verb} --help"
        raise Refusal(Failure("command.line", what, "", fix))
    return known.noun, verb, vars(options)


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
        print(result.page or shown["summary"])
    for failure in result.failures:
        print(f"{failure.code}: {failure.sentence()}", file=sys.stderr)


def run(argv: list[str], screen: Screen | None = None) -> tuple[Result, bool]:
    """Run one command; return its result and whether it is to be printed as JSON."""
    as_json, name = "--json" in argv, "gpuready"
    try:
        noun, verb, options = _parse(argv)
        name = f"gpuready {noun} {options['verb']}"
        given = object_of(options["input"] or "-") if verb.takes_input else {}
        own_environment(os.environ, given.pop("proxy", None))
        call = Call(
            input=given,
            arguments=[
                options[argument]
                for argument in [*verb.arguments, verb.optional_argument]
                if argument and options[argument] is not None
            ],
            check=bool(options.get("check")),
            options={option.key: options[option.key] for option in verb.options},
            screen=screen or Screen.of(sys.stdout),
        )
        changes = verb.changes and not call.check
        with turn.taken(name) if changes else contextlib.nullcontext():
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
        what = f"{error.filename}" if error.filename else name
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
    try:
        _print(result, as_json)
    except BrokenPipeError:
        # Who read has seen enough; what is still buffered must not be tried again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return int(result.exit)


def _print(result: Result, as_json: bool) -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    if as_json:
        json.dump(result.data if result.bare and not result.failures else result.as_dict(), sys.stdout)
        print()
    else:
        _print_for_people(result)
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
