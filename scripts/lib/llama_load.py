"""llama_load.py SERVER MODEL [REQUESTS [OPTIONS OF llama-server…]]: one prompt again and again, among others.

llama-server has four slots and its prompt cache, and six clients, first stock and then with the back end. A fifth of
the requests have the same prompt. Prints how many different answers it got: tokens and their log-probabilities, to the
last bit. Exit status 1 where the back end gave more than one.
"""

from __future__ import annotations

import json
import random
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

# A prompt cache of 8 MiB forgets some prompts. The log has errors only.
SERVER = ("-np", "4", "-c", "8192", "-fa", "on", "-t", "1", "-cram", "8", "--no-warmup", "-lv", "1")
TEXT = "a sum of many small terms may come out in more than one way when its order is not the same each time"


def prompts(requests: int) -> list[str]:
    """The first one is there at every fifth place; half of the others begin as it does, and end anywhere."""
    draw, words = random.Random(0), TEXT.split()
    text = " ".join(draw.choices(words, k=90))
    made = []
    for i in range(requests):
        begin = text[: draw.randrange(len(text))] if draw.random() < 0.5 else ""
        other = begin + " ".join(draw.choices(words, k=draw.randrange(2, 80)))
        made.append(other if i % 5 else text)
    return made


def answer(port: int, prompt: str) -> str:
    asked = {"prompt": prompt, "n_predict": 4, "temperature": 0, "n_probs": 3, "cache_prompt": True}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/completion", json.dumps(asked).encode())
    with urllib.request.urlopen(request, timeout=600) as reply:
        return json.dumps(json.load(reply)["completion_probabilities"])


@contextmanager
def server(*command: str, env: Mapping[str, str] | None = None) -> Iterator[int]:
    """The port of a llama-server that answers. env: the process's whole environment; None for this process's."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([*command, "--port", str(port)], stdout=subprocess.DEVNULL, env=env)
    try:
        while process.poll() is None:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=10).close()
                break
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.2)
        else:
            sys.exit(process.returncode or 1)  # stderr has its reason
        yield port
    finally:
        process.terminate()
        process.wait()


def main(program: str, model: str, requests: str = "200", *options: str) -> int:
    if not requests.isdecimal() or int(requests) == 0:
        sys.exit(f"REQUESTS: got {requests}, expected a number from 1 on")
    asked, different = prompts(int(requests)), []
    print(f"{len(asked)} requests, {asked.count(asked[0])} of them with one prompt")
    for name, device in (("stock", ("none",)), ("zinc_attn", ("ZINC0", "-ngl", "99"))):
        begin = time.monotonic()
        command = (program, "-m", model, "--device", *device, *SERVER, *options)
        with server(*command) as port, ThreadPoolExecutor(6) as clients:
            answers = list(clients.map(lambda prompt: answer(port, prompt), asked))
        found = Counter(given for prompt, given in zip(asked, answers, strict=True) if prompt == asked[0])
        different.append(len(found))
        most = found.most_common(1)[0][1]
        answers_found = "1 answer" if len(found) == 1 else f"{len(found)} different answers"
        print(
            f"{name:10} {answers_found}, the commonest in {most} of {found.total()} requests; "
            f"{time.monotonic() - begin:.0f} s",
            flush=True,
        )
    return int(different[1] > 1)


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))
