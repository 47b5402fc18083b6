"""llama_bench.py LLAMA_BENCH MODEL ZINC VULKAN [OPTIONS OF llama-bench…]: tokens per second beside other back ends.

ZINC and VULKAN are back ends' libraries; an empty VULKAN is left out. Each test is run by every back end in turns:
a prompt of 512 tokens, 128 tokens of text, and 32 behind 8,192 and 32,768 tokens; other tests with -p, -n and -d.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median

TESTS = (
    ("-p", "512", "-n", "0"),
    ("-p", "0", "-n", "128"),
    *(("-p", "0", "-n", "32", "-d", d) for d in ("8192", "32768")),
)
ROUNDS = 3
WARM_NS = 10**9  # of work, after which a GPU has its clocks


class FailedError(Exception):
    """A program of llama.cpp ended with a status other than 0."""


def speeds(program: str, model: str, device: str, library: str | Path, options: Sequence[str]) -> dict[str, float]:
    """Tokens per second of one run, by the names of its tests: the median of repetitions after a second of work, or
    the last one. FailedError where the device does not run it."""
    command = [program, "-m", model, "-dev", device, "-ngl", "99" if library else "0", "-fa", "on", "-r", "1"]
    environment = {"GGML_VK_VISIBLE_DEVICES": "0"} | os.environ | {"GGML_BACKEND_PATH": str(library)}
    if not library:
        del environment["GGML_BACKEND_PATH"]
    ran = subprocess.run(
        [*command, "-o", "json", *options], env=environment, capture_output=True, text=True, check=False
    )
    if ran.returncode:
        raise FailedError(f"llama-bench -dev {device}: exit status {ran.returncode}\n{ran.stderr[-2000:]}")
    found, worked_ns = {}, 0
    for one in json.loads(ran.stdout):
        name = f"pp{one['n_prompt']}" if one["n_prompt"] else f"tg{one['n_gen']}"
        warm = []
        for took_ns, tokens_s in zip(one["samples_ns"], one["samples_ts"], strict=True):
            warm += [tokens_s] if worked_ns >= WARM_NS else []
            worked_ns += took_ns
        found[name + (f" @ {one['n_depth']}" if one["n_depth"] else "")] = median(warm or one["samples_ts"][-1:])
    return found


def main() -> None:
    program, model, zinc, vulkan, *options = sys.argv[1:]
    backends = {"zinc_attn": ("ZINC0", zinc), "CPU": ("none", "")}
    if vulkan:
        backends["ggml-vulkan"] = ("Vulkan0", vulkan)
    tests = [()] if {"-p", "-n", "-d"} & set(options) else TESTS
    print(f"{'tokens/s, median of ' + str(ROUNDS):24}" + "".join(f"{name:>14}" for name in backends), flush=True)
    for test in tests:
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in backends}
        for _ in range(ROUNDS):
            for name, (device, library) in backends.items():
                runs[name].append(speeds(program, model, device, library, [*test, *options]))
        for told in runs["zinc_attn"][0]:
            medians = (median(run[told] for run in found) for found in runs.values())
            print(f"{told:24}" + "".join(f"{value:14.2f}" for value in medians), flush=True)


if __name__ == "__main__":
    try:
        main()
    except FailedError as error:
        sys.exit(str(error))
