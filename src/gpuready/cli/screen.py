"""What people read, on a terminal or in a pipe: its width, its colours and characters, and texts laid out for it."""

from __future__ import annotations

import os
import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TextIO

from gpuready.outcome import visible

COLUMNS = 80
NARROWEST, WIDEST = 60, 120
"""Below, the table of a bar breaks; beyond, lines are hard to follow."""
_COLOURS = {
    "bold": 1,
    "dim": 2,
    "red": 31,
    "green": 32,
    "yellow": 33,
    "blue": 34,
    "magenta": 35,
    "cyan": 36,
    "grey": 90,
}


@dataclass(frozen=True)
class Screen:
    """What a reader's terminal can show; the defaults are those of a pipe."""

    width: int = COLUMNS
    colour: bool = False
    unicode: bool = False

    @staticmethod
    def of(stream: TextIO) -> Screen:
        """Return what a stream leads to: colour on a terminal alone, and only what its encoding holds."""
        terminal = stream.isatty()
        encoding = (getattr(stream, "encoding", None) or "ascii").lower().replace("-", "")
        width = shutil.get_terminal_size((COLUMNS, 24)).columns if terminal else COLUMNS
        plain = "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb"
        return Screen(max(NARROWEST, min(width, WIDEST)), terminal and not plain, encoding.startswith("utf"))

    def paint(self, text: str, colour: str) -> str:
        """Return a text in a colour, where there is colour."""
        return f"\033[{_COLOURS[colour]}m{text}\033[0m" if self.colour and text else text

    def heading(self, text: str) -> list[str]:
        """Return the lines that begin a part."""
        return [self.paint(line, "bold") for line in self.paragraph(text)]

    def paragraph(self, text: str, first: str = "", rest: str | None = None) -> list[str]:
        """Return a sentence in lines that fit, the first with one indent and the others with another."""
        after = " " * len(first) if rest is None else rest
        return textwrap.wrap(
            self.plain(text),
            self.width,
            initial_indent=first,
            subsequent_indent=after,
            break_long_words=True,
            break_on_hyphens=False,
        ) or [first.rstrip()]

    def plain(self, text: str) -> str:
        """Return a text that cannot steer the terminal and that its encoding holds."""
        text = visible(text)
        return text if self.unicode else text.translate(_ASCII).encode("ascii", "backslashreplace").decode()

    def table(self, head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
        """Return a table: the first `left` columns start left, the others end right; too long cells are cut.

        What is too much for the width is taken from the widest of the left columns.
        """
        cells = [[self.plain(cell) for cell in row] for row in [head, *rows]]
        widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
        spare = self.width - sum(widths) - 2 * (len(head) - 1)
        while spare < 0 and left:
            widest = max(range(left), key=lambda column: widths[column])
            taken = min(-spare, max(0, widths[widest] - 8))
            if not taken:
                break
            step = min(taken, 1)
            widths[widest] -= step
            spare += step
        lines = []
        for number, row in enumerate(cells):
            shown = [
                _cut(cell, widths[column], self.unicode).ljust(widths[column])
                if column < left
                else cell.rjust(widths[column])
                for column, cell in enumerate(row)
            ]
            line = "  ".join(shown).rstrip()
            lines.append(self.paint(line, "bold") if number == 0 else line)
        return lines


_ASCII = str.maketrans(
    {
        "\u2013": "-",
        "\u2014": "-",
        "\u2026": "...",
        "\u00d7": "x",
        "\u00b1": "+-",
        "\u2009": ",",
        "\u2265": ">=",
        "\u2264": "<=",
        "\u2192": "->",
        "\u201c": '"',
        "\u201d": '"',
        "\u2019": "'",
    }
)


def _cut(text: str, width: int, unicode: bool) -> str:
    if len(text) <= width:
        return text
    end = "\u2026" if unicode else "~"
    return text[: width - 1] + end
