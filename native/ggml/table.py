"""table.py PROGRAM MODEL [TYPE [TOKENS]]: the digests of a model's logits, stock llama.cpp's beside the back end's.

One line for each way in which a host can come to the same prompt. A star marks a digest that is not its group's first.
Exit status 1 where the back end's digests differ within a group.
"""

from __future__ import annotations

import subprocess
import sys


def digests(program: str, model: str, device: str, dtype: str, tokens: str) -> list[list[str]]:
    """(group, way, digest) of each line that the program prints for a device."""
    command = (program, model, device, dtype, tokens)
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(done.returncode)  # stderr has the program's reason
    return [line.split("\t") for line in done.stdout.splitlines()]


def marked(lines: list[list[str]]) -> list[str]:
    """Each digest, with a star where it differs from the first of its group."""
    first: dict[str, str] = {}
    return [digest + ("*" if first.setdefault(group, digest) != digest else "") for group, _, digest in lines]


def main(program: str, model: str, dtype: str = "f16", tokens: str = "600") -> int:
    stock, ours = (digests(program, model, device, dtype, tokens) for device in ("none", "ZINC0"))
    print(f"{'':42}  {'stock':17}  zinc_attn")
    for (group, way, _), left, right in zip(stock, marked(stock), marked(ours), strict=True):
        print(f"{group + ': ' + way:42}  {left:17}  {right}")
    different = [sum(name.endswith("*") for name in marked(lines)) for lines in (stock, ours)]
    print(f"{'different':42}  {different[0]:<17}  {different[1]}")
    return int(different[1] > 0)


if __name__ == "__main__":
    if not 3 <= len(sys.argv) <= 5:
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))
