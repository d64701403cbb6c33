"""Short processes spend no time on Python's cyclic garbage collector."""

from __future__ import annotations

import gc
import subprocess
import sys

from fsdptool.garbage import without_gc

PROGRAM = """
import atexit, gc
from fsdptool.garbage import collect_seldom
collect_seldom()
kept = [[number] for number in range(400_000)]
print("full collections:", gc.get_stats()[2]["collections"])
class Noisy:
    def __del__(self):
        print("collected at the end")
first, second = Noisy(), Noisy()
first.other, second.other = second, first
del first, second
atexit.register(print, "exit handlers ran")
"""


def printed(program: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_a_short_process_makes_no_full_collection_and_none_at_its_end() -> None:
    assert printed(PROGRAM) == ["full collections: 0", "exit handlers ran"]


def test_with_pythons_defaults_the_same_program_makes_both() -> None:
    lines = printed(PROGRAM.replace("\ncollect_seldom()\n", "\n"))
    assert lines[0] != "full collections: 0"
    assert lines[1:] == ["exit handlers ran", "collected at the end", "collected at the end"]


def test_without_gc_restores_the_previous_state() -> None:
    assert gc.isenabled()
    with without_gc(), without_gc():
        assert not gc.isenabled()
    assert gc.isenabled()
