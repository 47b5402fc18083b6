"""Slips of one token in native/ are seen by the tests that ``native_slips`` names: the default run tries a few of them,
``--full`` all."""

import os
import re
import shutil
import subprocess
import sys

import pytest
from c_host import NATIVE, ROOT, needs_compiler
from native_slips import SLIPS
from support import FULL

DEFAULT = "the smallest cache", "an overlap that goes on", "what q5_0 holds"
ONE_DISPATCHER = True
pytestmark = needs_compiler


def test_the_table_is_of_the_files():
    """Each text occurs once."""
    for slip in SLIPS:
        assert (NATIVE / slip.file).read_text().count(slip.old) == 1, slip
    names = {slip.breaks for slip in SLIPS}
    assert len(names) == len(SLIPS) >= 40 and names.issuperset(DEFAULT)


@pytest.mark.parametrize("slip", [slip for slip in SLIPS if FULL or slip.breaks in DEFAULT], ids=str)
def test_a_slip_is_caught(slip, tmp_path):
    """By a failure or a crash of the test that the table names, and by no compiler."""
    shutil.copytree(NATIVE, tmp_path / "native")
    file = tmp_path / "native" / slip.file
    file.write_text(file.read_text().replace(slip.old, slip.new))
    path, _, name = slip.test.partition("::")
    chosen = [slip.test] if "[" in name else [path, "-k", name]
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *chosen]
    env = {**os.environ, "ZINC_ATTN_NATIVE": str(tmp_path / "native")}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env, timeout=300)
    assert done.returncode == 1 or done.returncode < 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert not re.search(r":\d+:\d+: error: ", done.stdout), done.stdout[-2000:]
