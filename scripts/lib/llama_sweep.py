"""llama_sweep.py DEPTH MODEL [OPTIONS]: tokens per second of a decode step behind longer and longer contexts.

DEPTH is the program of llama_depth.cpp. Each context is decoded by the split rule and with one split a row, whose
logits must be equal to the bit. Beside them are a card's, by the cost model: with attention, and of the weights alone.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from gguf import GGUFReader

from zinc_attn import errors
from zinc_attn.checks import check_int
from zinc_attn.graph.pieces import TYPES
from zinc_attn.graph.units import tile_of_units
from zinc_attn.kernels.matrix import MatrixFragment
from zinc_attn.shapes import AttnShape
from zinc_attn.tools.compilers.graph import MOST_CYCLES, MOST_CYCLES_ELSE
from zinc_attn.tools.cost import CARDS, Card, find_card, predict_rows
from zinc_attn.tools.cost.assumptions import GAP_US
from zinc_attn.tools.cost.step import ModelStep
from zinc_attn.tools.harness.files import check_out, write_file
from zinc_attn.tools.harness.inputs import parse_contexts
from zinc_attn.tools.measure import MODELED, rows_png

LAYOUTS: Final = {"auto": "", "1": "1"}  # of the picture, and what ZINC_ATTN_SPLITS says
ALONE: Final = "none"
PROMPT: Final = 512  # tokens
STATES_ISSUE: Final = 9  # the time of states' bytes is nine times a token's issue for them: docs/graph.md
HEAD_BARRIERS: Final = 4  # of a step outside its layers: the token's row, the last norm, the output


@dataclass(frozen=True)
class Point:
    """Tokens per second behind a context, by one layout, measured and modeled; digest: of the logits."""

    context: int
    layout: str
    measured: float
    modeled: float
    digest: str = ""


class Product(NamedTuple):
    """A tensor of a layer. used: the part of it that a token takes, of experts the chosen ones."""

    kind: str
    elements: int
    size: int  # bytes
    used: float

    @classmethod
    def of(cls, tensor: Any, used: float) -> Product:
        part = used if "_exps" in tensor.name else 1.0
        kind = tensor.tensor_type.name
        return cls(kind[:1].lower() + kind[1:], int(tensor.n_elements), int(tensor.n_bytes), part)

    def us(self, rows: int, card: Card) -> float:
        """µs with so many rows of x: of its bytes, or of tiles of matrix units at the cycles that their gate allows."""
        read = self.size / card.read_rate
        tile = tile_of_units(self.kind, MatrixFragment(16, 16, 16)) if self.kind in TYPES else None
        if tile is None:
            return read
        columns = tile[1] * math.ceil(rows * self.used / tile[1])
        cycles = MOST_CYCLES.get(self.kind, MOST_CYCLES_ELSE) / (32 * 32 * 64)  # of a product of two numbers
        rate = card.compute_units * card.family.simds * card.clock_ghz * 1e3  # cycles in a µs
        return max(read, self.elements * columns * cycles / rate)


class Model:
    """What a GGUF says of a step: its tensors' bytes, and the heads of its attention."""

    def __init__(self, path: str) -> None:
        try:
            reader = GGUFReader(path)
            self.arch = reader.fields["general.architecture"].contents()
        except (ValueError, IndexError, KeyError, OSError) as error:
            raise errors.ArgumentError(f"{path}: expected a whole GGUF of a model ({error!r})") from error
        self._fields = {name.removeprefix(self.arch + "."): one for name, one in reader.fields.items()}
        self.name = self._fields["general.name"].contents() if "general.name" in self._fields else Path(path).name
        self.layers = self.number("block_count")
        used = self.number("expert_used_count", 0) / max(self.number("expert_count", 1), 1)
        names = [tensor.name for tensor in reader.tensors]
        self.head_bytes = self.layer_bytes = 0
        self.products = [Product.of(tensor, used) for tensor in reader.tensors if tensor.name.startswith("blk.")]
        for tensor in reader.tensors:
            size = round(tensor.n_bytes * (used if "_exps" in tensor.name else 1))
            if tensor.name.startswith("blk."):
                self.layer_bytes += size
            elif tensor.name != "token_embd.weight" or "output.weight" not in names:
                self.head_bytes += size
        self.attending = len({name for name in names if name.endswith((".attn_output.weight", ".attn_kv_b.weight"))})
        heads, kv_heads = self.number("attention.head_count"), self.number("attention.head_count_kv")
        head_dim = self.number("attention.key_length", self.number("embedding_length") // heads)
        self.shape = AttnShape(heads, kv_heads, head_dim, self.number("attention.value_length", head_dim))
        state = self.number("ssm.state_size", 0) * self.number("ssm.inner_size", 0)
        self.state_bytes = 2 * 4 * state * (self.layers - self.attending)  # float32, read and written

    def number(self, name: str, default: int | None = None) -> int:
        """A number of the architecture's, of layers that differ the largest."""
        if name not in self._fields:
            if default is None:
                raise errors.ArgumentError(f"{self.arch}.{name}: the model's file does not say it")
            return default
        found = self._fields[name].contents()
        return int(max(found) if isinstance(found, list) else found)

    def prompt_us(self, rows: int, step: ModelStep, layers: int, card: Card) -> float:
        """µs of a prompt by ``step``'s layers: products, states (docs/graph.md), attention, and a step's barriers."""
        products = layers / self.layers * sum(product.us(rows, card) for product in self.products)
        states = rows * step.states / card.read_rate / STATES_ISSUE
        attention = step.layers * predict_rows(step.shape, card, rows, rows, step.dtype).total_us
        return products + states + attention + self.head_bytes / card.read_rate + step.barriers * GAP_US

    def step(self, layers: int, barriers: int, dtype: str) -> ModelStep:
        """A step of ``layers`` layers such as the file's. barriers: of the file's layers."""
        of_layers = barriers - HEAD_BARRIERS - 2 * self.attending  # attention's two passes are its own
        times = layers / self.layers
        return ModelStep(
            *(round(self.head_bytes + times * self.layer_bytes), round(times * self.state_bytes)),
            *(round(HEAD_BARRIERS + times * of_layers), round(times * self.attending), self.shape, dtype),
        )


def measured(given: argparse.Namespace, contexts: list[int], splits: str) -> list[tuple[str, float, int, int]]:
    """Of each context the digest of the logits, ms of a step, and its dispatches and barriers."""
    environment = os.environ | ({"ZINC_ATTN_SPLITS": splits} if splits else {})
    command = [given.depth, given.model, given.type, str(given.steps), *map(str, contexts)]
    found = list[tuple[str, float, int, int]]()
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as ran:
        for context in contexts:
            way = "one split" if splits else "the rule"
            print(f"sweep: by {way}, a step after {context:,} tokens", file=sys.stderr)
            line = ran.stdout.readline() if ran.stdout else ""
            if not line:
                break
            _, digest, ms, dispatches, barriers = line.split()
            found.append((digest, float(ms), int(dispatches), int(barriers)))
    if ran.returncode or len(found) < len(contexts):
        sys.exit(f"sweep: {Path(given.depth).name} ended with exit status {ran.returncode}")
    return found


def records(points: list[Point], step: ModelStep) -> list[dict[str, Any]]:
    """What the picture takes: each point measured and modeled."""
    same = {"shape": str(step.shape), "dtype": step.dtype, "device": "", "device_kind": ""}
    found = []
    for point in points:
        one = same | {"layout": point.layout, "context": point.context}
        found.append(one | {"runtime": "vulkan", "measure": "call", "tokens_s": point.measured, "logits": point.digest})
        found.append(one | {"runtime": MODELED, "measure": MODELED, "tokens_s": point.modeled})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/llama sweep", description=__doc__)
    parser.add_argument("depth", help=argparse.SUPPRESS)
    parser.add_argument("model", help="a GGUF")
    parser.add_argument("--contexts", default="1k,8k,32k", help="in tokens (k = 1024)")
    parser.add_argument("--type", default="f16", help="of the cache")
    parser.add_argument("--steps", type=int, default=8, help="that are timed at each context")
    parser.add_argument("--card", default="r9700", help=f"that is modeled: {', '.join(CARDS)}")
    parser.add_argument("--layers", type=int, help="of the modeled step, such as the file's (the file's)")
    parser.add_argument("--out", type=Path, default=Path(), help="folder for llama-sweep.png and llama-sweep.json")
    given = parser.parse_args()
    try:
        for name in ("steps", "layers"):
            if getattr(given, name) is not None:
                check_int(f"--{name}", getattr(given, name), 1)
        check_out(given.out)
        run(given)
    except errors.ZincAttnError as error:
        sys.exit(f"sweep: {error}")


def run(given: argparse.Namespace) -> None:
    contexts, card, model = parse_contexts(given.contexts), find_card(given.card), Model(given.model)
    found = {layout: measured(given, [0, *contexts], splits) for layout, splits in LAYOUTS.items()}
    (_, alone, *_), *_, (_, _, dispatches, barriers) = found["auto"]  # at the longest: two passes
    step = model.step(given.layers or model.layers, barriers, given.type)
    print(
        f"{model.name}: {model.attending} of {model.layers} layers attend; {dispatches} dispatches, {barriers} barriers"
    )
    print(
        f"{card.title}, modeled: {step.weights / 1e9:.2f} GB of weights, {step.states / 1e6:.0f} MB of states, "
        f"{step.layers} layers that attend, {step.barriers} other barriers"
    )
    prompt = model.prompt_us(PROMPT, step, given.layers or model.layers, card)
    print(f"a prompt of {PROMPT} tokens: {PROMPT / prompt * 1e6:,.0f} tokens/s")
    print(f"{'':8}  {'measured tokens/s':19}  {'':16}  {'modeled tokens/s':27}     of the")
    names = ("context", "rule", "one split", "logits", "rule", "one split", "weights", "bandwidth")
    print("{:>8}  {:>9} {:>9}  {:16}  {:>8} {:>9} {:>8}  {}".format(*names))
    points = []
    for at, context in enumerate(contexts, 1):
        here = [
            Point(context, layout, 1e3 / rows[at][1], 1e6 / step.us(context, card, splits), rows[at][0])
            for (layout, rows), splits in zip(found.items(), (None, 1), strict=True)
        ]
        points += [*here, Point(context, ALONE, 1e3 / alone, 1e6 / step.us(0, card))]
        rule, one, weights = points[-3:]
        print(
            f"{context:8,}  {rule.measured:9.2f} {one.measured:9.2f}  {rule.digest}  {rule.modeled:8.1f} "
            f"{one.modeled:9.1f} {weights.modeled:8.1f}  {step.fraction(context, card):9.0%}"
        )
        if rule.measured < one.measured:
            print(
                "sweep: one split was measured as the faster; a busy machine does that, so run it again",
                file=sys.stderr,
            )
        if rule.digest != one.digest:
            sys.exit(f"sweep: behind {context} tokens the logits of one split are others: {one.digest}")
    notes = f"{model.name}, cache {given.type}\nmodeled: {card.title}, {step.layers} layers that attend"
    rows = records(points, step)
    write_file(given.out / "llama-sweep.json", json.dumps(rows, indent=1).encode())
    if png := rows_png(rows, "Tokens per second by context", notes, "tokens_s"):
        write_file(given.out / "llama-sweep.png", png)


if __name__ == "__main__":
    main()
