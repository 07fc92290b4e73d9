"""`gpuready plan backtest`: the planner against runs that were measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpuready.cli.reading import called, json_of
from gpuready.cli.screen import Screen
from gpuready.cli.verb import Call, Option
from gpuready.cli.writing import write
from gpuready.outcome import Failure, MachineCannot, Refusal, Result
from gpuready.planning.accuracy import backtest

OPTIONS = (
    Option("plot", "also write predicted against observed as an SVG picture", "FILE"),
    Option("report", "also write every run and every error as a Markdown page", "FILE"),
)
# What a terminal has room for: errors in one table, bands and starts in another.
_ERRORS, _BANDS = (0, 1, 2, 3, 4, 5, 6), (0, 1, 7, 8, 9)
_SHORT = ("runs", "kind", "judged", "weights", "9 of 10", "KV", "9 of 10", "in band", "widest", "starts told right")


def records_of(path: str) -> list[Mapping[str, Any]]:
    """Return the runs that a file holds: a list of objects, or an object with such a list under `records`.

    Entries that are no objects are answered among the others, where there are others.
    """
    given = json_of(path)
    found = given.get("records") if isinstance(given, dict) else given
    if not isinstance(found, list) or (found and not any(isinstance(one, dict) for one in found)):
        fields = "id, engine, engine_version, model, gpu, observed ... (docs/planner-accuracy.md)"
        what = f"{called(path)} holds no list of runs"
        raise Refusal(Failure("plan.runs", what, "", f"give a JSON list of objects with {fields}"))
    return found


def run_backtest(call: Call) -> Result:
    """Judge the planner by every run of a file."""
    data = backtest.run(records_of(call.arguments[0]))
    lines = page(data["summary"], call.screen)
    for option in ("plot", "report"):
        if call.options[option]:
            write(call.options[option], _made(option, data))
            lines += ["", f"{call.options[option]} is written."]
    told = data["summary"]
    summary = f"{told['judged']} of {told['rows']} runs can be judged"
    return Result(summary=summary, page="\n".join(lines), data=data, bare=True)


def _made(option: str, data: Mapping[str, Any]) -> str:
    try:
        from gpuready.rendering import accuracy
    except ModuleNotFoundError as error:
        what = f"--{option}: pictures and pages are made on the controller only"
        raise MachineCannot(Failure("plan.controller", what, "", "run it from the checkout's .venv")) from error
    return accuracy.picture(data["records"]) if option == "plot" else accuracy.page(data)


def page(summary: Mapping[str, Any], screen: Screen) -> list[str]:
    """Return the errors of each kind of runs, and why runs were not judged."""
    rows = backtest.table(summary["classes"])
    lines = screen.heading(f"{summary['judged']} of {summary['rows']} runs can be judged")
    if rows:
        for columns in (_ERRORS, _BANDS):
            cells = [[row[column] for column in columns] for row in rows]
            lines += ["", *screen.table([_SHORT[column] for column in columns], cells, left=2)]
        text = "Errors are medians of what was measured, without their sign, and what nine of ten runs stay below."
        lines += ["", *screen.paragraph(text)]
    if summary["not_judged"]:
        lines += ["", *screen.heading("Not judged")]
        for reason, count in summary["not_judged"].items():
            lines += screen.paragraph(f"{count}: {reason}.", "  - ")
    return lines
