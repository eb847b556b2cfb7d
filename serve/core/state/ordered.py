"""A sorted set that stays fast at both ends and in the middle, for any size it meets here."""

from bisect import bisect_left, insort

#: Sort keys are tuples of integers that end in the task's id, so no two are equal.
Key = tuple[int, ...]

#: Buckets split at twice this. Moving some hundred pointers costs less than one comparison
#: in Python, so an operation costs two binary searches: log n.
_BUCKET = 256


class SortedKeys:
    """Unique keys in ascending order: add, remove and look at either end in O(log n)."""

    __slots__ = ("_buckets", "_lasts", "_size")

    def __init__(self) -> None:
        #: No bucket is empty; every key of one is below every key of the next.
        self._buckets: list[list[Key]] = []
        #: The last key of each bucket.
        self._lasts: list[Key] = []
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def add(self, key: Key) -> None:
        """Insert `key`, which must not be in the set."""
        buckets, lasts = self._buckets, self._lasts
        self._size += 1
        if not buckets:
            buckets.append([key])
            lasts.append(key)
            return
        at = bisect_left(lasts, key)
        if at == len(buckets):
            at -= 1
            bucket = buckets[at]
            bucket.append(key)
            lasts[at] = key
        else:
            bucket = buckets[at]
            insort(bucket, key)
        if len(bucket) > 2 * _BUCKET:
            upper = bucket[_BUCKET:]
            del bucket[_BUCKET:]
            buckets.insert(at + 1, upper)
            lasts[at] = bucket[-1]
            lasts.insert(at + 1, upper[-1])

    def remove(self, key: Key) -> None:
        """Take `key` out; raises KeyError when it is not in."""
        at = bisect_left(self._lasts, key)
        bucket = self._buckets[at] if at < len(self._buckets) else []
        index = bisect_left(bucket, key)
        if index == len(bucket) or bucket[index] != key:
            raise KeyError(key)
        del bucket[index]
        self._size -= 1
        if not bucket:
            del self._buckets[at], self._lasts[at]
        elif index == len(bucket):
            self._lasts[at] = bucket[-1]

    def first(self) -> Key | None:
        """Return the smallest key; None when empty."""
        return self._buckets[0][0] if self._buckets else None

    def head(self, count: int) -> list[Key]:
        """Return the `count` smallest keys, ascending; fewer when there are fewer."""
        found: list[Key] = []
        for bucket in self._buckets:
            found += bucket[: count - len(found)]
            if len(found) >= count:
                break
        return found

    def tail(self, count: int) -> list[Key]:
        """Return the `count` largest keys, ascending; fewer when there are fewer."""
        found: list[Key] = []
        for bucket in reversed(self._buckets):
            missing = count - len(found)
            if missing <= 0:
                break
            found = bucket[-missing:] + found
        return found

    def since(self, key: Key, count: int) -> list[Key]:
        """The `count` smallest keys that are at least `key`, ascending."""
        at = bisect_left(self._lasts, key)
        if at == len(self._buckets):
            return []
        start = bisect_left(self._buckets[at], key)
        found = self._buckets[at][start : start + count]
        for bucket in self._buckets[at + 1 :]:
            if len(found) >= count:
                break
            found += bucket[: count - len(found)]
        return found
