"""llama_threads.py MODEL MODEL: two threads open, use and close models of llama-cpp-python, for ``test_llama.py``.

A line says how many of their digests of logits are other than where a thread has the device alone, or that none is.
"""

import hashlib
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from llama_cpp import Llama

from zinc_attn.integrations import llama_cpp

GENERATIONS = ((20, 20, 20), (2,) * 6)  # tokens: one thread decodes while the other opens models


def logits(path: str, tokens: int) -> str:
    """A digest of the logits after a prompt, and after each of ``tokens`` greedy tokens."""
    model = Llama(
        path, n_gpu_layers=-1, flash_attn=True, n_ctx=256, n_batch=64, logits_all=True, n_threads=1, n_threads_batch=1
    )
    digest, token = hashlib.sha256(), [*range(3, 60)]
    for _ in range(tokens + 1):
        model.eval(token)
        row = model.scores[model.n_tokens - 1]
        digest.update(row.tobytes())
        token = [int(row.argmax())]
    model.close()
    return digest.hexdigest()


def digests(path: str, generations: tuple[int, ...], start: threading.Barrier) -> Iterator[str]:
    start.wait()
    for tokens in generations:
        try:
            yield logits(path, tokens)
        except (RuntimeError, ValueError) as error:  # of llama-cpp-python: not opened, or not decoded
            yield str(error)


def by_threads(together: int) -> list[list[str]]:
    start = threading.Barrier(together)
    with ThreadPoolExecutor(together) as pool:
        return list(pool.map(lambda *told: [*digests(*told, start)], sys.argv[1:], GENERATIONS))


llama_cpp.load()
many, alone = by_threads(2), by_threads(1)
wrong = [
    a for thread, expected in zip(many, alone, strict=True) for a, b in zip(thread, expected, strict=True) if a != b
]
print(len(wrong) or "none", *wrong)
