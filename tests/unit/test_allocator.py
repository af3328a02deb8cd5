"""What becomes of memory that a process has freed."""

import os
import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the options are those of glibc")

SIZE = 2**28
SCRIPT = f"""
import ctypes, resource
from worldmodel import allocator

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

allocator.keep_freed_memory()
for repeat in range(2):
    before = faults()
    block = ctypes.create_string_buffer({SIZE})  # filled with zeros
    del block
print(faults() - before)
"""


def page_faults(**variables: str) -> int:
    """Return the page faults of the second of two equal large blocks in a process that keeps freed memory."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    command = [sys.executable, "-c", SCRIPT]
    run = subprocess.run(command, env=environment | variables, capture_output=True, text=True, check=True)
    return int(run.stdout)


def test_freed_blocks_are_used_again_unless_the_user_says_otherwise() -> None:
    huge_pages = SIZE // 2**21  # the largest pages that a kernel may use
    assert page_faults() < huge_pages / 4
    assert page_faults(MALLOC_MMAP_MAX_="65536", MALLOC_MMAP_THRESHOLD_="131072") >= huge_pages
