"""scripts/lib/llama_bench.py with a program in llama-bench's place."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "lib"))
import llama_bench

MS = 10**6


def test_speeds_are_those_after_a_second_of_work(tmp_path):
    """The second test begins warm, and the third is over before it would be."""
    samples = ((512, 0, 0, (600, 600, 100, 100)), (0, 32, 4096, (1, 2, 4)), (0, 8, 0, (1, 2)))
    program = tmp_path / "llama-bench"
    program.write_text(f"#!/bin/sh\ncat {tmp_path}/rows\n")
    program.chmod(0o755)

    def speeds(*tests):
        keys = "n_prompt", "n_gen", "n_depth", "samples_ns", "samples_ts"
        values = [(*x, [MS * ms for ms in took], [1e3 / ms for ms in took]) for *x, took in tests]
        rows = [dict(zip(keys, row, strict=True)) for row in values]
        (tmp_path / "rows").write_text(json.dumps(rows))
        return llama_bench.speeds(str(program), "m", "ZINC0", "library", [])

    assert speeds(*samples[:2]) == {"pp512": 10.0, "tg32 @ 4096": 500.0}
    assert speeds(samples[2]) == {"tg8": 500.0}
    program.write_text("#!/bin/sh\nexit 3\n")
    with pytest.raises(llama_bench.FailedError, match="llama-bench -dev ZINC0: exit status 3"):
        speeds()
