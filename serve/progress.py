"""The callback through which slow work tells how far it is."""

from collections.abc import Callable

#: Takes the step that begins, as text for people, and the share of the whole that is done, 0 to 1.
Progress = Callable[[str, float], None]
