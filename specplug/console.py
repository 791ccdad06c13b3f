"""The one console on stderr, the log handler and the progress bar that share it. Stdout stays free for the result."""

import logging
import sys
import time

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.logging import RichHandler
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

# Where there is no terminal to ask for its width, lines may be long: a log is searched, not looked at.
console = Console(stderr=True, width=None if sys.stderr.isatty() else 160)
PLAIN_SECONDS = 10.0  # without a terminal: a line this often at most


class Handler(RichHandler):
    """Named in conf/hydra/job_logging/stderr.yaml."""

    def __init__(self, level: int = logging.NOTSET) -> None:
        super().__init__(level, console=console, show_path=False, show_time=False, rich_tracebacks=False)


def table_of(rows: list[list[str]]) -> Table:
    """Header first; the first column to the left, numbers to the right. Cells are text, whatever brackets they have."""
    table = Table(box=box.SIMPLE, pad_edge=False)
    for k, name in enumerate(rows[0]):
        table.add_column(Text(name), justify="right" if k else "left")
    for row in rows[1:]:
        table.add_row(*map(Text, row), style="bold" if row[0] == "all" else None)
    return table


class Bar:
    """A bar in a terminal, with a free text beside it and a table above it; a plain line now and then elsewhere. Not
    reusable."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.rich: Progress | None = None
        self.live: Live | None = None
        self.table: list[list[str]] = []
        self.total: int | None = 0  # None: nobody knows
        self.first, self.started, self.printed = 0, 0.0, 0.0

    def start(self, total: int | None, done: int = 0) -> "Bar":
        self.total, self.first, self.started = total, done, time.perf_counter()
        self.printed = self.started
        if console.is_terminal:
            self.rich = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                TextColumn("{task.fields[text]}"),
                console=console,
            )
            self.live = Live(get_renderable=self.renderable, console=console)
            self.live.start()
            self.task = self.rich.add_task(self.title, total=total, completed=done, text="")
        return self

    def renderable(self) -> RenderableType:
        assert self.rich is not None
        return Group(table_of(self.table), self.rich) if self.table else self.rich

    def advance(self, done: int, text: str = "", table: list[list[str]] | None = None) -> None:
        """`table`: header first, shown in a terminal alone and for as long as the bar runs."""
        self.table = table or []
        if self.rich is not None:
            self.rich.update(self.task, completed=done, text=text)
            return
        now = time.perf_counter()
        if now - self.printed >= PLAIN_SECONDS or done == self.total:
            self.printed = now
            where = f"{done}"
            if self.total is not None:
                left = (now - self.started) / max(done - self.first, 1) * (self.total - done)
                where, text = f"{done}/{self.total}", f"{text}  {left:.0f} s left"
            print(f"{self.title} {where}  {text}", file=sys.stderr, flush=True)

    def stop(self) -> None:
        self.table = []
        if self.live is not None:
            self.live.stop()
