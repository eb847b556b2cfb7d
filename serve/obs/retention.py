"""How long the report's rows are kept: deleted by age and size, the oldest first, in small pieces.

A piece takes a few milliseconds, so neither the writer of the database nor its readers wait for a
whole clean-up. Freed pages are used again by new rows, so the file stops growing. In a database
made by this version they also go back to the file system (SQLite's incremental vacuum).
"""

import sqlite3

import msgspec

#: Most rows of a piece, and most pages that it gives back.
PIECE_ROWS = 500
PIECE_PAGES = 256
#: Rows deleted before the size is looked at again.
_STEP_ROWS = 50
#: Part of the size limit to which a database beyond it is cut, so that it is not cut every second.
_CUT_TO = 0.98
#: `auto_vacuum` of SQLite by number.
INCREMENTAL = 2

_OLDEST = "SELECT row_id FROM request {where} ORDER BY arrived_unix_ns LIMIT ?"
_DELETE = f"DELETE FROM request WHERE row_id IN ({_OLDEST})"


class Retention(msgspec.Struct, frozen=True):
    """What is kept; None sets no bound."""

    #: Age of the oldest rows, by their arrival.
    keep_ns: int | None = None
    #: Size of what the database holds, free pages not counted.
    max_bytes: int | None = None


KEEP_ALL = Retention()


class Trimmer:
    """Deletes what a database holds beyond its bounds, a piece at each call."""

    def __init__(self, db: sqlite3.Connection, retention: Retention) -> None:
        self._db = db
        #: What is kept; may change.
        self.retention = retention
        #: Size to reach before the size counts as within its bound; None while it does.
        self._cut_to_bytes: float | None = None

    def trim(self, now_unix_ns: int, most_rows: int = PIECE_ROWS) -> int:
        """Delete at most `most_rows` rows and give back pages; return the number of rows deleted.

        Commits. Raises sqlite3.Error.
        """
        deleted = 0
        if self.retention.keep_ns is not None:
            # Times are whole numbers of 64 bits in the database; none is before 1970.
            oldest_ns = max(0, now_unix_ns - self.retention.keep_ns)
            deleted = self._delete("WHERE arrived_unix_ns < ?", (oldest_ns, most_rows))
        while deleted < most_rows and self._too_large():
            found = self._delete("", (min(_STEP_ROWS, most_rows - deleted),))
            if not found:
                break
            deleted += found
        self._db.commit()
        self._give_back()
        return deleted

    def _too_large(self) -> bool:
        most_bytes = self.retention.max_bytes
        if most_bytes is None:
            return False
        size_bytes = used_bytes(self._db)
        if self._cut_to_bytes is None and size_bytes > most_bytes:
            self._cut_to_bytes = most_bytes * _CUT_TO
        elif self._cut_to_bytes is not None and size_bytes <= self._cut_to_bytes:
            self._cut_to_bytes = None
        return self._cut_to_bytes is not None

    def _delete(self, where: str, values: tuple[int, ...]) -> int:
        return self._db.execute(_DELETE.format(where=where), values).rowcount

    def _give_back(self) -> None:
        if _pragma(self._db, "auto_vacuum") == INCREMENTAL and _pragma(self._db, "freelist_count"):
            # `execute` would give back a single page: a page for each step, and it takes one.
            self._db.executescript(f"PRAGMA incremental_vacuum({PIECE_PAGES})")


def give_back_pages(db: sqlite3.Connection) -> None:
    """Have a database without tables give pages back to the file system from now on."""
    db.execute(f"PRAGMA auto_vacuum = {INCREMENTAL}")


def used_bytes(db: sqlite3.Connection) -> int:
    """Return the size of what the database holds, without its free pages."""
    pages = _pragma(db, "page_count") - _pragma(db, "freelist_count")
    return pages * _pragma(db, "page_size")


def free_bytes(db: sqlite3.Connection) -> int:
    """Return the size of the free pages in the database's file."""
    return _pragma(db, "freelist_count") * _pragma(db, "page_size")


def _pragma(db: sqlite3.Connection, name: str) -> int:
    value: int = db.execute(f"PRAGMA {name}").fetchone()[0]
    return value
