#!/usr/bin/env python3
"""Measures a server that speaks OpenAI's API: time to first token, inter-token latency and throughput over concurrency.

    scripts/benchmark.py http://HOST:8080
    scripts/benchmark.py --limit h100-sg-01

Exit codes: 0 measured; 2 refused input; 3 the server cannot be reached, or does not list the model; 4 more requests
failed than --max-failed-percent allows; 130 stopped by Ctrl-C, with what was measured until then.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import signal
import sys
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PYTHON = ROOT / ".venv/bin/python"
if __name__ == "__main__" and Path(sys.prefix) != ROOT / ".venv":
    if not PYTHON.exists():
        print("scripts/benchmark.py: .venv is missing; make it with ./scripts/setup first.", file=sys.stderr)
        sys.exit(3)
    os.execv(PYTHON, [str(PYTHON), *sys.argv])  # noqa: S606 - the same script in our own environment

from rich.console import Console  # noqa: E402
from rich.markup import escape  # noqa: E402
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn  # noqa: E402
from rich.table import Table  # noqa: E402

from gpuready.benchmark import page, report, session, settings  # noqa: E402
from gpuready.benchmark.client import Client  # noqa: E402
from gpuready.outcome import Exit, Failure, Refusal  # noqa: E402
from gpuready.rendering.plots import number  # noqa: E402

KEY_VARIABLE = "GPUREADY_API_KEY"
INTERRUPTED = 130


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """Return the parsed command line."""
    parser = argparse.ArgumentParser(
        prog="scripts/benchmark.py",
        description=(__doc__ or "").splitlines()[0],
        epilog=f"An API key comes from --api-key-file or the environment variable {KEY_VARIABLE}, never from here.",
    )
    add = parser.add_argument
    add("url", nargs="?", metavar="URL", help="where the API is, e.g. http://HOST:8080")
    add("-l", "--limit", metavar="HOST", help="instead of URL: a host of the inventory, whose gateway is measured")
    add("-i", "--inventory", metavar="PATH", help="the inventory for --limit (default: the one of ansible.cfg)")
    add("--model", metavar="NAME", help="the model to ask for (default: the one that the server lists)")
    add("--concurrency", default="1,2,4,8,16", metavar="LEVELS", help="requests in flight (default: %(default)s)")
    add("--requests", type=int, metavar="N", help="requests of each level (default: 20, or 5 times the level)")
    add("--prompt-tokens", type=int, default=512, metavar="N", help="length of the prompts (default: %(default)s)")
    add("--output-tokens", type=int, default=128, metavar="N", help="length of the answers (default: %(default)s)")
    add(
        "--seed",
        type=int,
        metavar="N",
        help="the same prompts again (default: new ones, for no prefix cache knows them)",
    )
    add(
        "--warmup",
        type=int,
        metavar="N",
        help="requests before each level, not measured (default: as many as the level)",
    )
    add("--timeout", type=float, default=300.0, metavar="SECONDS", help="for a whole request (default: %(default)g)")
    add("--api-key-file", type=Path, metavar="PATH", help="a file that holds the API key")
    add("--ca-file", type=Path, metavar="PATH", help="certificates to trust instead of the system's")
    add("--insecure", action="store_true", help="do not check the server's certificate")
    add(
        "--max-failed-percent",
        type=float,
        default=1.0,
        metavar="P",
        help="failed requests that are no failure (default: %(default)g)",
    )
    add("--note", default="", metavar="TEXT", help="a sentence for the report, e.g. what is special about this server")
    add("--out", type=Path, metavar="DIR", help="where the result goes (default: .cache/benchmark/HOST-TIME)")
    add(
        "--json",
        action="store_true",
        help="print the result as JSON to standard output, everything else to standard error",
    )
    return parser.parse_args(argv)


def read_settings(options: argparse.Namespace) -> settings.Settings:
    """Return the settings that the command line asks for; every problem is a Refusal."""
    if bool(options.url) == bool(options.limit):
        raise Refusal(Failure("benchmark.argument", "one of URL and --limit is needed", "", "e.g. http://HOST:8080"))
    url, stack = options.url, ""
    if options.limit:
        # Brings the whole of spec along, which takes longer to load than all else here.
        from gpuready.benchmark import inventory

        host = inventory.gateway_of(options.limit, options.inventory, ROOT, PYTHON.with_name("ansible"))
        address = f"[{host['address']}]" if ":" in host["address"] else host["address"]
        url, stack = f"http://{address}:{host['port']}", host["stack"]
    key = None
    if options.api_key_file:
        key = settings.read_api_key(options.api_key_file)
    elif os.environ.get(KEY_VARIABLE):
        key = settings.checked_api_key(os.environ[KEY_VARIABLE], KEY_VARIABLE)
    found = settings.Settings(
        url=settings.base_url(url),
        seed=secrets.randbelow(2**32) if options.seed is None else options.seed,
        model=options.model,
        levels=settings.parse_levels(options.concurrency),
        requests=options.requests,
        prompt_tokens=options.prompt_tokens,
        output_tokens=options.output_tokens,
        warmup=options.warmup,
        timeout_seconds=options.timeout,
        api_key=key,
        ca_file=options.ca_file,
        insecure=options.insecure,
        max_failed_percent=options.max_failed_percent,
        note=options.note,
        simulated=stack == "cpu",
    )
    settings.refuse_if_wrong(found)
    return found


class Screen:
    """Tells how far a run is: a bar on a terminal, plain lines elsewhere."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.bar = Progress(
            TextColumn("concurrency {task.fields[level]:>4}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self.task: TaskID | None = None

    def say(self, sentence: str) -> None:
        """Print one sentence."""
        self.console.print(printable(sentence), soft_wrap=True, markup=False, highlight=False)

    def begin(self, level: int, requests: int) -> None:
        """Show a level's bar."""
        self.task = self.bar.add_task("", total=requests, level=level)
        if not self.console.is_terminal:
            self.say(f"concurrency {level}: {requests} requests ...")

    def advance(self) -> None:
        """Move the bar."""
        if self.task is not None:
            self.bar.advance(self.task)

    def end(self, page: Mapping[str, Any]) -> None:
        """Tell what a level came to."""
        rate = page["throughput"]["steady"]["output_tokens_per_second"]
        if self.task is not None:
            self.bar.remove_task(self.task)
        self.say(
            f"concurrency {page['concurrency']}: TTFT p50 {shown(page['ttft_ms']['p50'])} ms, "
            f"ITL p50 {shown(page['itl_ms']['p50'])} ms, {shown(rate)} tokens/s, {page['requests']['failed']} failed"
        )


def shown(value: float | None) -> str:
    """Return a number, or that it is not known."""
    return "unknown" if value is None else number(value).replace("\u2009", " ")


def printable(text: str) -> str:
    """Return a text that cannot steer the terminal: a server chose parts of it."""
    return "".join(letter if letter.isprintable() or letter == "\n" else "?" for letter in text)


def summary_table(document: Mapping[str, Any]) -> Table:
    """Return the numbers that an operator looks at first."""
    table = Table(title=escape(printable(f"{document['model']} at {document['server']['url']}")), title_justify="left")
    columns = (
        "in\nflight",
        "TTFT p50\nms",
        "TTFT p95\nms",
        "ITL p50\nms",
        "ITL p99\nms",
        "requests\n/s",
        "tokens\n/s",
        "failed",
    )
    for column in columns:
        table.add_column(column, justify="right")
    for level in document["levels"]:
        steady = level["throughput"]["steady"]
        table.add_row(
            str(level["concurrency"]),
            *(
                shown(level[name][key])
                for name in ("ttft_ms", "itl_ms")
                for key in ("p50", "p95" if name == "ttft_ms" else "p99")
            ),
            shown(steady["requests_per_second"]),
            shown(steady["output_tokens_per_second"]),
            str(level["requests"]["failed"]),
        )
    return table


async def run(found: settings.Settings, screen: Screen) -> report.Measured:
    """Measure; the first Ctrl-C stops in order, a second one at once."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()

    def stopped() -> None:
        loop.remove_signal_handler(signal.SIGINT)
        stop.set()

    loop.add_signal_handler(signal.SIGINT, stopped)
    async with Client(found) as client:
        with screen.bar:
            return await session.measure(client, screen, stop)


def finish(measured: report.Measured, folder: report.Folder, console: Console, as_json: bool) -> int:
    """Write the result, say where it is and what it came to; return the exit code."""
    document = measured.as_dict()
    folder.write(measured, page.html(document))
    if as_json:
        print(json.dumps(document, indent=2))
    console.print(summary_table(document))
    for note in document["notes"]:
        console.print(printable(note), soft_wrap=True, markup=False, highlight=False)
    console.print(f"report: {folder.path / report.PAGE}", soft_wrap=True, markup=False, highlight=False)
    if measured.verdict == "failed":
        first = next(error["first"] for level in document["levels"] for error in level["errors"])
        print(
            f"benchmark: {measured.failed_percent:.1f} % of the requests failed, "
            f"{measured.settings.max_failed_percent:g} % are allowed; the first: {printable(first)}",
            file=sys.stderr,
        )
        return Exit.FAILED
    if measured.verdict == "interrupted":
        print("benchmark: stopped early; what was measured until then is kept", file=sys.stderr)
        return INTERRUPTED
    return Exit.DONE


def main(argv: list[str] | None = None) -> int:
    """Run the command; every problem ends as one sentence."""
    options = arguments(argv)
    console = Console(stderr=options.json)
    folder = None
    try:
        found = read_settings(options)
        stamp = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%SZ")
        folder = report.Folder(options.out or ROOT / f".cache/benchmark/{found.host.replace(':', '_')}-{stamp}")
        screen = Screen(console)
        if found.key_is_exposed:
            screen.say(f"Warning: the API key goes to {found.host} unencrypted, as the address is not https.")
        measured = asyncio.run(run(found, screen))
        return finish(measured, folder, console, options.json)
    except Refusal as refusal:
        for failure in refusal.failures:
            print(f"benchmark: {printable(failure.sentence())}", file=sys.stderr)
        return refusal.exit
    except session.Interrupted:
        print("benchmark: stopped before anything was measured", file=sys.stderr)
        return INTERRUPTED
    except KeyboardInterrupt:
        print("benchmark: stopped at once; nothing was kept", file=sys.stderr)
        return INTERRUPTED
    finally:
        if folder:
            folder.remove_if_empty()


if __name__ == "__main__":
    sys.exit(main())
