"""Takes the network away from this process and from all that it starts."""

from __future__ import annotations

import ctypes
import platform
import socket
import struct
from collections.abc import Sequence

from exportkit.errors import HostError

_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _MODE_FILTER = 22, 38, 2
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06  # BPF_LD|W|ABS, BPF_JMP|JEQ|K, BPF_JMP|JGE|K, BPF_RET|K
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data
_ALLOW, _KILL, _REFUSE = 0x7FFF0000, 0x80000000, 0x00050000 | 13  # 13 is EACCES
_FAMILIES = (socket.AF_INET, socket.AF_INET6, socket.AF_PACKET)

_OTHER_NUMBERS = 0x40000000  # of x32's calls, which an x86-64 process may make as well

# By machine: the architecture of its calls, and the numbers of `socket` and of `io_uring_setup`, which opens sockets.
_CALLS = {"x86_64": (0xC000003E, 41, 425), "aarch64": (0xC00000B7, 198, 425)}


def go_offline() -> None:
    """Lets the kernel refuse every socket of the network from now on, or raises HostError. Open sockets stay open."""
    if (calls := _CALLS.get(platform.machine())) is None:
        raise HostError(f"the network cannot be taken away from a process on {platform.machine()}")
    program = _filter(*calls)
    code = b"".join(struct.pack("HBBI", *step) for step in program)
    buffer = ctypes.create_string_buffer(code, len(code))

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("steps", ctypes.c_void_p))

    given = Program(len(program), ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    prctl = libc.prctl
    prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]
    if prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or prctl(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.addressof(given), 0, 0):
        raise HostError(f"the kernel does not take the network away from a process (errno {ctypes.get_errno()})")


def _filter(architecture: int, socket_call: int, ring_call: int) -> Sequence[tuple[int, int, int, int]]:
    """The program: each step is an instruction, its two jumps and its operand."""
    count = len(_FAMILIES)  # the refusal is at the end, over the families and the permission
    return [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, count + 5, 0, _OTHER_NUMBERS),
        (_EQUAL, count + 4, 0, ring_call),
        (_EQUAL, 1, 0, socket_call),
        (_RETURN, 0, 0, _ALLOW),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        *((_EQUAL, count - place, 0, int(family)) for place, family in enumerate(_FAMILIES)),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _REFUSE),
    ]
