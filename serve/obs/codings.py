"""Codings that a client takes an answer in, by its header `Accept-Encoding`."""

import re
from collections.abc import Iterator

_NEVER = re.compile(r"q=0(\.0*)?")


def taken_codings(accepted: str) -> Iterator[str]:
    """Yield the names in the header, in lower case and its order, without those of weight 0."""
    for part in re.sub(r"\s", "", accepted.lower()).split(","):
        name, _, weight = part.partition(";")
        if not _NEVER.fullmatch(weight):
            yield name
