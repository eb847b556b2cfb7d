"""SIGCHLD only for children that end, not for those that are stopped or go on.

Lanes and training processes are stopped and woken by signals, many times a second. By default the
kernel tells their parent of each, which would then run on a core that a lane is about to take.
"""

import ctypes
import signal

_SA_NOCLDSTOP = 1
_libc = ctypes.CDLL(None, use_errno=True)


class _Action(ctypes.Structure):
    """The C library's ``struct sigaction`` on Linux."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_ubyte * 128),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


def hear_only_of_ends() -> None:
    """Have the kernel tell this process of children that ended only; its handler stays.

    A handler that is set later brings the default back.
    """
    action = _Action()
    if _libc.sigaction(signal.SIGCHLD, None, ctypes.byref(action)) == 0:
        action.flags |= _SA_NOCLDSTOP
        _libc.sigaction(signal.SIGCHLD, ctypes.byref(action), None)
