"""A console that prints texts literally.

Most texts hold words from a file, a server or a user, so brackets and colons in them are no markup.
Colour is given as a style instead.
"""

from typing import Any

import rich.console
from rich.progress import TextColumn
from rich.text import Text


class Console(rich.console.Console):
    """rich's console without markup, emoji names and highlighted numbers."""

    def __init__(self, **options: Any) -> None:
        """`options` are those of ``rich.console.Console``."""
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def print_error(self, error: Exception) -> None:
        """Print the line that a failed command ends with."""
        self.print(Text.assemble(("error:", "red"), f" {error}"), soft_wrap=True)


def description_column() -> TextColumn:
    """Return the column with a progress bar's description, printed literally."""
    return TextColumn("{task.description}", markup=False)
