"""The kinds of streams that a lane on a GPU has."""

from enum import Enum


class StreamKind(Enum):
    """Which of a lane's streams a run uses."""

    ORDINARY = "ordinary"
    #: Multiprocessors that become free go to its kernels first.
    URGENT = "urgent"
    #: Its kernels stay off the multiprocessors that are reserved for short runs.
    BOUNDED = "bounded"


#: The streams of a lane where no multiprocessors are reserved.
UNPARTITIONED = StreamKind.ORDINARY, StreamKind.URGENT
