"""What msgspec raises for bytes that it cannot decode."""

import msgspec

#: Text that is no UTF-8, and lists in lists without end, have errors of their own.
UNDECODABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
