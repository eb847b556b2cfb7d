"""A progress line on a terminal, for work that takes seconds; nothing is shown elsewhere."""

from types import TracebackType

from rich.progress import BarColumn, Progress, TimeElapsedColumn

from serve.terminal import Console, description_column


class Steps:
    """A line with the current step, a bar and the elapsed time; it disappears when closed."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            description_column(),
            BarColumn(bar_width=24),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("starting", total=1.0)

    def __enter__(self) -> "Steps":
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def tell(self, step: str, fraction: float) -> None:
        """Show `step`, with `fraction` of the whole done, 0 to 1. A ``Progress``."""
        self._progress.update(self._task, description=step, completed=fraction)

    def close(self) -> None:
        """Remove the line. Idempotent."""
        self._progress.stop()
