"""Rows of what was measured, and how they are printed."""

from dataclasses import dataclass

_LEFT, _RIGHT = str.ljust, str.rjust
_COLUMNS = (
    ("", _LEFT),
    ("ranks", _RIGHT),
    ("median", _RIGHT),
    ("10-90 %", _RIGHT),
    ("beside", _LEFT),
    ("median", _RIGHT),
    (None, _RIGHT),  # `Row.compared`
    ("goal", _RIGHT),
    ("", _LEFT),
)


@dataclass(frozen=True)
class Row:
    """One line of a table. All times are in seconds."""

    what: str
    #: "2", or "2 x 2" for two replicas a rank.
    ranks: str
    #: The median of what was measured.
    value: float
    #: Where most of it lies: 10 and 90 % of the batches are below.
    spread: tuple[float, float] | None = None
    #: "s", or "%" of a core.
    unit: str = "s"
    #: What it is held against, and that one's median.
    yardstick: str = ""
    yardstick_value: float | None = None
    #: "difference", "ratio", or "slowest" of all; a goal is for it, and without it for the value.
    comparison: str = ""
    compared: float | None = None
    #: The most that it should be.
    goal: float | None = None
    #: What was not only slow but wrong.
    problem: str = ""

    @property
    def is_over(self):
        """Whether the goal is missed."""
        if self.goal is None:
            return False
        return (self.value if self.compared is None else self.compared) > self.goal

    def cells(self):
        """Return the texts of the columns."""
        compared, goal = self.compared, self.goal
        verdict = "" if goal is None else "over" if self.is_over else "ok"
        return (
            self.what,
            self.ranks,
            _quantity(self.value, self.unit),
            "" if self.spread is None else _range(self.spread, self.unit),
            self.yardstick,
            "" if self.yardstick_value is None else _quantity(self.yardstick_value, self.unit),
            "" if compared is None else self._limit(compared),
            "" if goal is None else self._limit(goal),
            f"WRONG: {self.problem}" if self.problem else verdict,
        )

    def _limit(self, number):
        if self.comparison == "ratio":
            return f"{number:.3f} x" if number < 2 else f"{_digits(number)} x"
        text = _quantity(number, self.unit)
        return f"+{text}" if self.comparison == "difference" and number >= 0 else text


def table(rows, compared="against it"):
    """Return the rows as aligned text, without columns that are empty.

    Parameters
    ----------
    rows : sequence of Row
    compared : str
        What stands above the column of `Row.compared`.
    """
    columns = []
    for (heading, align), *cells in zip(_COLUMNS, *(row.cells() for row in rows), strict=True):
        if any(cells):
            column = [compared if heading is None else heading, *cells]
            width = max(map(len, column))
            columns.append([align(cell, width) for cell in column])
    return "\n".join("  ".join(line).rstrip() for line in zip(*columns, strict=True))


def _scaled(seconds):
    """Return the factor and the name of the unit in which to write some seconds."""
    for name, factor in (("s", 1), ("ms", 1e3)):
        if abs(seconds) * factor >= 1:
            return factor, name
    return 1e6, "µs"


def _digits(number):
    return f"{number:.0f}" if abs(number) >= 100 else f"{number:.3g}" if number else "0"


def _quantity(number, unit):
    if unit == "%":
        return f"{_digits(100 * number)} %"
    factor, name = _scaled(number)
    return f"{_digits(number * factor)} {name}"


def _range(spread, unit):
    """Return "1.2-1.4 µs"."""
    factor, name = (100, "%") if unit == "%" else _scaled(spread[1])
    return f"{_digits(spread[0] * factor)}-{_digits(spread[1] * factor)} {name}"
