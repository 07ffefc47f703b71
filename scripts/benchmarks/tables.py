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
    ("10-90 %", _RIGHT),
    ("against it", _RIGHT),
    ("goal", _RIGHT),
    ("", _LEFT),
)
_NOTHING = ("", "", "", "")


@dataclass(frozen=True)
class Beside:
    """What a row's value is held against: another way to the same end, from the same run."""

    name: str
    #: The median of what was measured.
    value: float
    #: Where most of it lies: 10 and 90 % of the batches are below.
    spread: tuple[float, float] | None = None
    #: "ratio" or "difference" of the row's value and this one; "" where they are not compared.
    comparison: str = ""
    compared: float | None = None
    #: The most that `compared` should be, or `value` where they are not compared.
    goal: float | None = None

    @property
    def judged(self):
        """What the goal is for."""
        return self.value if self.compared is None else self.compared

    @property
    def is_over(self):
        """Whether the goal is missed."""
        return _is_over(self.judged, self.goal)

    def cells(self, unit):
        """Return the texts of the columns that are about it."""
        return (
            self.name,
            quantity(self.value, unit),
            _range(self.spread, unit),
            "" if self.compared is None else self._limit(self.compared, unit),
            "" if self.goal is None else self._limit(self.goal, unit),
            _verdict(self.judged, self.goal),
        )

    def _limit(self, number, unit):
        if self.comparison == "ratio":
            return f"{number:.3f} x" if number < 2 else f"{_digits(number)} x"
        text = quantity(number, unit)
        return f"+{text}" if self.comparison == "difference" and number >= 0 else text


@dataclass(frozen=True)
class Row:
    """What was measured, on a line of a table; what stands beside it may take further lines."""

    what: str
    #: "2", or "2 x 2" for two replicas a rank, or "3 on 2" for three replicas on two ranks.
    ranks: str
    #: The median of what was measured.
    value: float
    #: Where most of it lies: 10 and 90 % of the batches are below.
    spread: tuple[float, float] | None = None
    #: "s", "B", "%" of a core, or "" for a number of things.
    unit: str = "s"
    #: The most that the value should be.
    goal: float | None = None
    besides: tuple[Beside, ...] = ()
    #: Bytes of a replica's contribution: where the row stands in a plot.
    size_bytes: int | None = None
    #: What was not only slow but wrong.
    problem: str = ""

    @classmethod
    def of_record(cls, record):
        """Return the row of which `record` was made by `dataclasses.asdict`."""
        besides = tuple(Beside(**fields) for fields in record["besides"])
        return cls(**(record | {"besides": besides}))

    @property
    def is_over(self):
        """Whether a goal is missed."""
        return _is_over(self.value, self.goal) or any(side.is_over for side in self.besides)

    def lines(self):
        """Return the texts of the columns, for each line."""
        mine = (
            self.what,
            self.ranks,
            quantity(self.value, self.unit),
            _range(self.spread, self.unit),
        )
        sides = [side.cells(self.unit) for side in self.besides]
        if self.goal is not None or not sides:  # a line on which nothing stands beside the value
            goal = "" if self.goal is None else quantity(self.goal, self.unit)
            sides.insert(0, (*_NOTHING, goal, _verdict(self.value, self.goal)))
        if self.problem:
            sides[0] = (*sides[0][:-1], f"WRONG: {self.problem}")
        return [(*(_NOTHING if index else mine), *cells) for index, cells in enumerate(sides)]


@dataclass(frozen=True)
class Report:
    """A table, as one MPI library made it."""

    #: The module.
    name: str
    library: str
    title: str
    #: When it was made, and what its numbers depend on.
    facts: str
    rows: list[Row]

    def text(self):
        """Return it as it is printed."""
        return f"{self.title}\n{self.facts}\n\n{table(self.rows)}"


def table(rows):
    """Return the rows as aligned text, without columns that are empty."""
    columns = []
    lines = [line for row in rows for line in row.lines()]
    for (heading, align), *cells in zip(_COLUMNS, *lines, strict=True):
        if any(cells):
            column = [heading, *cells]
            width = max(map(len, column))
            columns.append([align(cell, width) for cell in column])
    return "\n".join("  ".join(line).rstrip() for line in zip(*columns, strict=True))


def rows_of(outcomes):
    """Return the rows that ranks told, in the order in which they did."""
    records = [record for outcome in outcomes for record in outcome.records]
    return [Row.of_record(record["row"]) for record in records if "row" in record]


def _is_over(value, goal):
    return goal is not None and value > goal


def _verdict(value, goal):
    return "" if goal is None else "over" if _is_over(value, goal) else "ok"


# Names of units by the number of one of them, the largest first; the last is for all below.
_SCALES = {
    "s": ((1, "s"), (1e-3, "ms"), (1e-6, "µs")),
    "B": ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "B")),
    "%": ((1e-2, "%"),),
    "": ((1, ""),),
}


def quantity(number, unit):
    """Return a number with its unit, as "1.2 µs"."""
    size, name = _scale(number, unit)
    return f"{_digits(number / size)} {name}".rstrip()


def _scale(number, unit):
    """Return the size and the name of the unit in which to write a number."""
    scales = _SCALES[unit]
    return next((scale for scale in scales if abs(number) >= scale[0]), scales[-1])


def _digits(number):
    return f"{number:.0f}" if abs(number) >= 100 else f"{number:.3g}" if number else "0"


def _range(spread, unit):
    """Return "1.2-1.4 µs"."""
    if spread is None:
        return ""
    size, name = _scale(spread[1], unit)
    return f"{_digits(spread[0] / size)}-{_digits(spread[1] / size)} {name}".rstrip()
