"""An allow-list of system calls, by seccomp: what code that has taken over a decoder can ask the kernel for.

Source: https://www.kernel.org/doc/html/latest/userspace-api/seccomp_filter.html
"""

import ctypes
import platform
import struct

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""`AUDIT_ARCH_*`, without which the numbers of the calls mean nothing."""
ALLOWED: dict[str, tuple[int, int]] = {
    "read": (0, 63),
    "write": (1, 64),
    "close": (3, 57),
    "fstat": (5, 80),
    "lseek": (8, 62),
    "mmap": (9, 222),
    "mprotect": (10, 226),
    "munmap": (11, 215),
    "brk": (12, 214),
    "mremap": (25, 216),
    "madvise": (28, 233),
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "sigaltstack": (131, 132),
    "restart_syscall": (219, 128),
    "sched_yield": (24, 124),
    "futex": (202, 98),
    "nanosleep": (35, 101),
    "clock_nanosleep": (230, 115),
    "clock_gettime": (228, 113),
    "getpid": (39, 172),
    "gettid": (186, 178),
    "getrusage": (98, 165),
    "sched_getaffinity": (204, 123),
    "getrandom": (318, 278),
    "sendto": (44, 206),
    "recvfrom": (45, 207),
    "sendmsg": (46, 211),
    "recvmsg": (47, 212),
    "exit": (60, 93),
    "exit_group": (231, 94),
    "membarrier": (324, 283),
    "rseq": (334, 293),
}
"""Numbers on x86_64 and on aarch64: memory, time, and the socket that is already open."""

_LOAD, _EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050001
"""`SECCOMP_RET_ALLOW`, and `SECCOMP_RET_ERRNO` with EPERM."""
_PR_SET_NO_NEW_PRIVS, _PR_GET_SECCOMP, _PR_SET_SECCOMP, _FILTER = 38, 21, 22, 2


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def _instructions(machine: str) -> list[tuple[int, int, int, int]]:
    """Return the filter as (code, jump if true, jump if false, operand)."""
    column = list(ARCHITECTURES).index(machine)
    numbers = sorted(each[column] for each in ALLOWED.values())
    tests = [(_EQUAL, len(numbers) - index, 0, number) for index, number in enumerate(numbers)]
    return [
        (_LOAD, 0, 0, 4),  # the architecture of the call
        (_EQUAL, 1, 0, ARCHITECTURES[machine]),
        (_RETURN, 0, 0, _REFUSE),
        (_LOAD, 0, 0, 0),  # its number
        *tests,
        (_RETURN, 0, 0, _REFUSE),
        (_RETURN, 0, 0, _ALLOW),
    ]


def supported() -> bool:
    """Return whether the kernel can refuse calls of a process."""
    return platform.machine() in ARCHITECTURES and ctypes.CDLL(None).prctl(_PR_GET_SECCOMP, 0, 0, 0, 0) >= 0


def allow_only_listed() -> bool:
    """Refuse all other calls of this process, with EPERM, for good; returns whether the kernel can."""
    if (machine := platform.machine()) not in ARCHITECTURES:
        return False
    packed = b"".join(struct.pack("=HBBI", *each) for each in _instructions(machine))
    program = _Program(len(packed) // 8, packed)
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    if prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        return False
    return prctl(_PR_SET_SECCOMP, _FILTER, ctypes.byref(program), 0, 0) == 0
