"""The terminal. Texts are printed as they are: most hold words of a file, a server or a user.

What is to have a colour gets a style of its own; brackets and colons in a text mean themselves.
"""

from typing import Any

import rich.console
from rich.progress import TextColumn
from rich.text import Text


class Console(rich.console.Console):
    """rich's console, which reads no markup, no emoji names and no numbers in what it prints."""

    def __init__(self, **options: Any) -> None:
        """`options` are rich's own."""
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def print_error(self, error: Exception) -> None:
        """The one line that a failed command ends with."""
        self.print(Text.assemble(("error:", "red"), f" {error}"), soft_wrap=True)


def description_column() -> TextColumn:
    """What a progress bar is about."""
    return TextColumn("{task.description}", markup=False)
