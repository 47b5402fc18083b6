"""The ggml back end's order of keys, without ggml and without a device: of writes, and of restored rows."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from c_host import NATIVE

COMPILER = shutil.which(os.environ.get("CXX", "c++"))
pytestmark = pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler (package g++)")
SANITIZE = ("-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")


@pytest.fixture(scope="module")
def ask(tmp_path_factory):
    """Ask the program for lines; their answers."""
    program = tmp_path_factory.mktemp("ggml") / "cells"
    sources = NATIVE / "ggml" / "cells.cpp", Path(__file__).with_name("ggml_cells.cpp")
    flags = ("-std=c++17", "-O0", "-Wall", "-Wextra", "-Werror", *SANITIZE, f"-I{NATIVE / 'ggml'}")
    subprocess.run([COMPILER, *flags, *sources, "-o", program], check=True)

    def asked(*lines):
        done = subprocess.run([program], input="\n".join(lines), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    return asked


def test_cells_are_in_the_order_of_their_last_write(ask, rng):
    lines, wanted = [], []
    for cells, writes in ((1, 0), (5, 3), (7, 400), (64, 64), (64, 1000)):
        chosen = rng.integers(0, cells, writes)
        lines.append(" ".join([str(cells), *(f"w{cell}" for cell in chosen)]))
        last = {int(cell): i for i, cell in enumerate(chosen)}
        wanted.append(sorted(range(cells), key=lambda cell, last=last: (last.get(cell, -1), cell)))
    assert [[int(x) for x in line.split()] for line in ask(*lines)] == wanted


WRITTEN = "w6 w7 w1"  # by a sequence whose rows are 10, 11, 12
STATE = "s1:12 s6:10 s7:11 ."
RESTORED = "r2:12 r4:10 r3:11 ."


@pytest.mark.parametrize(
    ("steps", "wanted"),
    [
        (f"{WRITTEN} {STATE} w5 {RESTORED} w0", "4 3 2 0"),  # as written, wherever its cells are
        (f"{WRITTEN} {STATE} f f {RESTORED} w0", "4 3 2 0"),
        (f"{WRITTEN} {STATE} f f f {RESTORED} w0", "2 4 3 0"),  # forgotten: as in the state
        (f"{WRITTEN} {STATE} r4:10 r3:11 . w0", "4 3 0"),  # a part that nobody saved: as in the state
        (f"{WRITTEN} {STATE} r2:12 r4:10 . w0", "2 4 0"),
        (f"{WRITTEN} {STATE} w0 w2 w3 s0:12 s2:10 s3:11 . {RESTORED}", "2 4 3"),  # equal rows have their last order
        (f"{WRITTEN} w0 {STATE} s0:99 s1:12 s7:11 . {RESTORED}", "4 3 2"),  # which end alike
        (f"{WRITTEN} s1:12 s6:10 s7:11 r2:12 r4:10 r3:11 w0", "2 4 3 0"),  # not yet whole
        (f"{WRITTEN} s1:12 S0:99 s6:10 S2:98 s7:11 . r2:12 R5:99 r4:10 R0:98 r3:11 .", "5 0 4 3 2"),  # two buffers
        (f"{WRITTEN} S1:12 S6:10 S7:11 {RESTORED}", "4 3 2"),  # from another buffer, which is not used since
    ],
)
def test_a_restored_sequence_has_the_order_of_its_writes_or_of_its_state(ask, steps, wanted):
    (answer,) = ask(f"8 {steps}")
    assert answer.endswith(f" {wanted}".rstrip() + " "), answer
