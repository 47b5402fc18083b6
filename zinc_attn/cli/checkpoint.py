"""How the commands that run a checkpoint begin: the checkpoint, the device, and who has which of the CPU's cores."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from ..decode.arithmetic import check_arithmetic
from ..dtypes import storage_dtype
from ..errors import ArgumentError
from ..runtime.device import Device
from ..tools import generate
from .terminal import note_cpu, plural, progress_bar, say

THREADS: Final = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "LP_NUM_THREADS")  # of torch, and of lavapipe


@contextmanager
def opened(
    args: argparse.Namespace, *, tokenizer: str = "", float32: bool = False, dtypes: Sequence[str] = ()
) -> Iterator[tuple[generate.HFModel, Any, Device]]:
    """The checkpoint of --model or --config, its tokenizer, and the device, whose arithmetic takes the cache's dtypes.

    tokenizer: what to say, behind the path, where there is none; empty where none is needed. dtypes: of the cache,
    those of --dtype or of the model unless given.
    """
    hosted = "torch" in sys.modules  # then the program that calls this one has chosen torch's threads
    with progress_bar(f"reading {args.model or args.config}"):
        if args.model:
            host, words = generate.load_checkpoint(args.model, float32=float32, tokenizer=bool(tokenizer))
        else:
            host, words = generate.build_model(args.config, args.seed), None
    if tokenizer and words is None:
        raise ArgumentError(tokenizer.format(args.model))
    with Device.open(args.device, runtime=args.runtime) as device:
        for dtype in dtypes or (args.dtype or storage_dtype(host.dtype),):
            check_arithmetic(args.arithmetic, device, dtype)
        note_cpu(device.info)
        if device.info.kind == "cpu" and not hosted:
            share_cores()
        yield host, words, device


def named(host: generate.HFModel, device: Device) -> dict[str, Any]:
    """What every JSON record begins with."""
    info = device.info
    return {"model": host.name, "device": info.name, "driver": info.driver, "runtime": device.runtime.name}


def share_cores() -> None:
    """Leave half of the cores to the device, which is this CPU, unless the user has said how many torch gets.

    torch's threads spin while they wait for each other: one that lacks a core holds all of them up.
    """
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = max(1, cores // 2)
    if threads < torch.get_num_threads() and not any(os.environ.get(name) for name in THREADS):
        torch.set_num_threads(threads)
        say(
            f"torch uses {plural(threads, 'thread')}, since attention runs on the same {cores} cores; OMP_NUM_THREADS "
            "sets another number"
        )
