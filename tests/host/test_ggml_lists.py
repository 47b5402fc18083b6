"""The ggml back end's order of keys, without ggml and without a device: write order, restored rows, lists of rows."""

import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from c_host import NATIVE

COMPILER = shutil.which(os.environ.get("CXX", "c++"))
pytestmark = pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler (package g++)")
SANITIZE = ("-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")


@pytest.fixture(scope="module")
def ask(tmp_path_factory):
    """Ask the program for lines; their answers."""
    program = tmp_path_factory.mktemp("ggml") / "lists"
    sources = (
        *(NATIVE / "ggml" / name for name in ("cells.cpp", "lists.cpp")),
        Path(__file__).with_name("ggml_lists.cpp"),
    )
    flags = ("-std=c++17", "-O0", "-Wall", "-Wextra", "-Werror", *SANITIZE, f"-I{NATIVE / 'ggml'}")
    subprocess.run([COMPILER, *flags, *sources, "-o", program], check=True)

    def asked(*lines):
        done = subprocess.run([program], input="\n".join(lines), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    return asked


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
    (answer,) = ask(f"states 8 {steps}")
    assert answer.endswith(f" {wanted}".rstrip() + " "), answer


def rows_of(answer):
    """Each row's pages and biases, and the words that the pages of all take."""
    head, pages, bias = answer.split("|")
    pages, bias = pages.split(), bias.split()
    rows = []
    for begin, count, offset in (map(int, row.split(",")) for row in head.split()):
        biases = offset < 0 or [float(x) for x in bias[offset : offset + count]]
        rows.append(([int(x) for x in pages[begin : begin + count]], biases))
    return rows, len(pages)


def line_of(mask, order, written=(0, 1), pages=(0, 1)):
    rows, cells = mask.shape
    words = mask.astype(np.float16).view(np.uint16).reshape(-1)
    numbers = (rows, cells, *written, *pages, len(order), *order, *words)
    return "lists " + " ".join(map(str, numbers))


def test_hidden_cells_take_no_place_and_rows_of_a_prompt_share_words(ask, rng):
    cells = 40
    order = rng.permutation(cells)
    mask = np.full((9, cells), -np.inf)
    for row in range(9):
        mask[row, order[: 20 + row]] = 0
    (answer,) = ask(line_of(mask, order, written=(0, 1), pages=(100, 3)))
    rows, words = rows_of(answer)
    assert [pages for pages, _ in rows] == [[100 + 3 * int(cell) for cell in order[: 20 + row]] for row in range(9)]
    assert all(bias is True for _, bias in rows) and words == 28


def test_a_window_shares_words_and_other_rows_do_not(ask, rng):
    mask = np.full((5, 16), -np.inf)
    for row in range(5):
        mask[row, row : row + 6] = 0
    window, words = rows_of(ask(line_of(mask, range(16)))[0])
    assert [pages for pages, _ in window] == [list(range(row, row + 6)) for row in range(5)] and words == 10
    mask = np.where(rng.random((7, 16)) < 0.5, 0.0, -np.inf)
    mask[2:] = -np.inf  # the third is within the second, the fourth goes on behind its end, and two see nothing
    mask[1, :], mask[2, 3:6], mask[3, [4, 5, 9]], mask[5, [9, 10]] = 0, 0, 0, 0
    rows, _ = rows_of(ask(line_of(mask, range(16)))[0])
    assert [pages for pages, _ in rows] == [np.flatnonzero(row == 0).tolist() for row in mask]


def test_cells_of_another_stream_are_not_seen_and_steps_are_kept(ask):
    order = [9, 4, 12, 0, 8, 6, 10, 5]  # cells 4, 6, 8, 10 are cells 0 to 3 of the operation
    rows, _ = rows_of(ask(line_of(np.zeros((1, 4)), order, written=(4, 2), pages=(7, 1)))[0])
    assert rows[0][0] == [7, 9, 8, 10]


def test_biases_are_those_of_the_visible_keys_by_rank(ask, rng):
    order = rng.permutation(30)
    mask = rng.standard_normal((3, 30)).astype(np.float16)
    mask[rng.random((3, 30)) < 0.3] = -np.inf
    mask[1, :] = np.where(np.isinf(mask[1]), mask[1], 0)
    mask[2, :2] = 6e-8, -1.2e-7  # subnormal
    rows, _ = rows_of(ask(line_of(mask, order))[0])
    for i, (pages, bias) in enumerate(rows):
        seen = [cell for cell in order if not np.isinf(mask[i, cell])]
        assert pages == seen and bias == (i == 1 or [float(mask[i, cell]) for cell in seen])
