"""What counts that servers tell again and again have grown by."""


class Growth:
    """Compares what each server tells with what it told before."""

    __slots__ = ("_told",)

    def __init__(self) -> None:
        self._told: dict[str, tuple[int, ...]] = {}

    def of(self, server: str, counts: tuple[int, ...], *, known: bool = False) -> tuple[int, ...]:
        """Return what a server's counts have grown by; zeros when they are told first.

        Counts that shrink have begun again at zero. With `known` a server that tells first has
        begun at zero too.
        """
        before = self._told.get(server, (0,) * len(counts) if known else counts)
        self._told[server] = counts
        if any(now < then for now, then in zip(counts, before, strict=True)):
            return counts
        return tuple(now - then for now, then in zip(counts, before, strict=True))
