"""A progress line on a terminal for work that takes seconds; silent anywhere else."""

from types import TracebackType

from rich.progress import BarColumn, Progress, TimeElapsedColumn

from serve.terminal import Console, description_column


class Steps:
    """One line with what is being done, a bar and the time; gone when closed."""

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
        """Show `step`; `fraction` of 1 is done."""
        self._progress.update(self._task, description=step, completed=fraction)

    def close(self) -> None:
        """Take the line away. Idempotent."""
        self._progress.stop()
