"""How the commands that run a checkpoint begin: the checkpoint and the device."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from ..dtypes import storage_dtype
from ..errors import ArgumentError
from ..runtime.device import Device
from ..tools import generate
from .arguments import refuse_arithmetic
from .terminal import note_cpu, progress_bar

COMPILING: Final = "compiling the kernels"


@contextmanager
def opened(
    args: argparse.Namespace, *, tokenizer: str = "", float32: bool = False, dtypes: Sequence[str] = ()
) -> Iterator[tuple[generate.HFModel, Any, Device]]:
    """The checkpoint of --model or --config, its tokenizer, and the device, whose arithmetic takes the cache's dtypes.

    tokenizer: what to say, behind the path, where there is none; empty where none is needed. dtypes: of the cache,
    those of --dtype or of the model unless given.
    """
    with progress_bar() as progress:
        if args.model:
            given = {"float32": float32, "tokenizer": bool(tokenizer)}
            host, words = generate.load_checkpoint(args.model, **given, progress=progress)
        else:
            host, words = generate.build_model(args.config, args.seed), None
    if tokenizer and words is None:
        raise ArgumentError(tokenizer.format(args.model))
    with Device.open(args.device, runtime=args.runtime) as device:
        for dtype in dtypes or (args.dtype or storage_dtype(host.dtype),):
            refuse_arithmetic(args.arithmetic, device, dtype)
        note_cpu(device.info)
        yield host, words, device
