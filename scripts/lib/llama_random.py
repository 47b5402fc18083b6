"""llama_random.py NAME LAYERS FILE: a GGUF of a known model's shapes as Q4_K_M has them, and random weights.

LAYERS: as many of the model's, from the first one on. The values are random bytes with scales that keep a layer's
result near its input's size, so that logits are numbers; nothing that the model says means anything.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFWriter

from zinc_attn.files import replacing

SEED: Final = 20260
Shape = tuple[int, ...]  # the last number is a row's length


@dataclass(frozen=True)
class Model:
    """The keys that llama.cpp reads of an architecture; sizes as Hugging Face's config.json names them."""

    arch: str
    layers: int
    hidden: int
    vocab: int
    q_heads: int
    kv_heads: int
    head_dim: int
    rotated: int
    base: float
    feed_forward: int  # of an expert, where there are some
    experts: int = 0
    experts_used: int = 0
    shared: int = 0  # the feed-forward size of the expert that all tokens take
    recurrent: int = 0  # of so many layers one attends, and the others are gated delta nets
    key_heads: int = 0  # of a delta net
    value_heads: int = 0
    state: int = 0
    sections: tuple[int, ...] = ()

    def attends(self, layer: int) -> bool:
        return not self.recurrent or (layer + 1) % self.recurrent == 0


MODELS: Final = {
    "qwen3.6-35b-a3b": Model(
        *("qwen35moe", 40, 2048, 248320, 16, 2, 256, 64, 1e7, 512, 256, 8, 512),
        **{"recurrent": 4, "key_heads": 16, "value_heads": 32, "state": 128, "sections": (11, 11, 10, 0)},
    ),
    "qwen3-30b-a3b": Model("qwen3moe", 48, 2048, 151936, 32, 4, 128, 128, 1e6, 768, 128, 8),
    "qwen3-8b": Model("qwen3", 36, 4096, 151936, 32, 8, 128, 128, 1e6, 12288),
    "tinyllama-1.1b": Model("llama", 22, 2048, 32000, 32, 4, 64, 64, 1e4, 5632),
    "llama-3.1-8b": Model("llama", 32, 4096, 128256, 32, 8, 128, 128, 5e5, 14336),
}


def tensors(model: Model, layers: int) -> Iterator[tuple[str, Shape, Kind]]:
    """Names, shapes and types of Q4_K_M: half of what feeds values and outputs has more bits."""
    hidden, heads = model.hidden, model.head_dim
    yield "token_embd.weight", (model.vocab, hidden), Kind.Q4_K
    yield "output.weight", (model.vocab, hidden), Kind.Q6_K
    yield "output_norm.weight", (hidden,), Kind.F32
    for i in range(layers):
        more = Kind.Q6_K if i < layers // 8 or i >= 7 * layers // 8 or (i - layers // 8) % 3 == 2 else Kind.Q4_K
        found: dict[str, tuple[Shape, Kind]] = {"attn_norm": ((hidden,), Kind.F32)}
        if model.attends(i):
            gated = 2 if model.recurrent else 1
            found |= {
                "attn_q": ((gated * model.q_heads * heads, hidden), Kind.Q4_K),
                "attn_k": ((model.kv_heads * heads, hidden), Kind.Q4_K),
                "attn_v": ((model.kv_heads * heads, hidden), more),
                "attn_output": ((hidden, model.q_heads * heads), Kind.Q4_K),
            }
            if model.arch.startswith("qwen"):
                found |= {name: ((heads,), Kind.F32) for name in ("attn_q_norm", "attn_k_norm")}
        else:
            keys, values = model.key_heads * model.state, model.value_heads * model.state
            found |= {
                "attn_qkv": ((2 * keys + values, hidden), more),
                "attn_gate": ((values, hidden), Kind.Q4_K),
                "ssm_conv1d": ((2 * keys + values, 4), Kind.F32),
                "ssm_dt.bias": ((model.value_heads,), Kind.F32),
                "ssm_a.": ((model.value_heads,), Kind.F32),
                "ssm_beta": ((model.value_heads, hidden), Kind.Q4_K),
                "ssm_alpha": ((model.value_heads, hidden), Kind.Q4_K),
                "ssm_norm": ((model.state,), Kind.F32),
                "ssm_out": ((hidden, values), Kind.Q4_K),
            }
        found["post_attention_norm" if model.recurrent else "ffn_norm"] = ((hidden,), Kind.F32)
        found |= feed_forward(model, more)
        for name, (shape, kind) in found.items():
            suffix = "" if "." in name else ".weight"
            yield f"blk.{i}.{name.removesuffix('.')}{suffix}", shape, kind


def feed_forward(model: Model, more: Kind) -> dict[str, tuple[Shape, Kind]]:
    hidden, size = model.hidden, model.feed_forward
    if not model.experts:
        up: dict[str, tuple[Shape, Kind]] = {name: ((size, hidden), Kind.Q4_K) for name in ("ffn_gate", "ffn_up")}
        return up | {"ffn_down": ((hidden, size), more)}
    found: dict[str, tuple[Shape, Kind]] = {"ffn_gate_inp": ((model.experts, hidden), Kind.F32)}
    found |= {name: ((model.experts, size, hidden), Kind.Q4_K) for name in ("ffn_gate_exps", "ffn_up_exps")}
    found["ffn_down_exps"] = ((model.experts, hidden, size), more)
    if model.shared:
        found["ffn_gate_inp_shexp"] = ((hidden,), Kind.F32)
        found |= {name: ((model.shared, hidden), Kind.Q4_K) for name in ("ffn_gate_shexp", "ffn_up_shexp")}
        found["ffn_down_shexp"] = ((hidden, model.shared), more)
    return found


def values(random: np.random.Generator, name: str, shape: Shape, kind: Kind) -> np.ndarray[Any, Any]:
    """Bytes (…, of a row) of a type of blocks, or float32."""
    length = shape[-1]
    if kind is Kind.F32:
        if "norm" in name:
            return np.ones(shape, np.float32)
        if name.endswith("ssm_a"):
            return -np.exp(random.standard_normal(shape, np.float32))
        return random.standard_normal(shape, np.float32) / np.float32(np.sqrt(length))
    size = 144 if kind is Kind.Q4_K else 210
    blocks = random.integers(0, 256, (*shape[:-1], length // 256, size), np.uint8)
    d = np.float16(1 / (200 * np.sqrt(length)))
    if kind is Kind.Q4_K:  # d, the factor of minima, scales, values
        blocks[..., :4] = np.array([d, 7.5 * d], np.float16).view(np.uint8)
    else:  # values, 16 scales, d
        blocks[..., 192:208] = (blocks[..., 192:208] & 31) - 16
        blocks[..., 208:] = np.array([d], np.float16).view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)


def write(model: Model, name: str, layers: int, path: Path) -> None:
    writer, arch = GGUFWriter(path, model.arch), model.arch
    writer.add_name(f"{name}, {layers} of {model.layers} layers, random weights")
    writer.add_tokenizer_model("none")
    numbers: dict[str, int] = {
        "context_length": 1 << 18,
        "vocab_size": model.vocab,
        "embedding_length": model.hidden,
        "block_count": layers,
        "feed_forward_length": model.feed_forward,
        "attention.head_count": model.q_heads,
        "attention.head_count_kv": model.kv_heads,
        "attention.key_length": model.head_dim,
        "attention.value_length": model.head_dim,
        "rope.dimension_count": model.rotated,
    }
    if model.experts:
        numbers |= {"expert_count": model.experts, "expert_used_count": model.experts_used}
        numbers["expert_feed_forward_length"] = model.feed_forward
    if model.shared:
        numbers["expert_shared_feed_forward_length"] = model.shared
    if model.recurrent:
        inner = model.value_heads * model.state
        numbers |= {"full_attention_interval": model.recurrent, "ssm.conv_kernel": 4, "ssm.inner_size": inner}
        numbers |= {"ssm.state_size": model.state, "ssm.time_step_rank": model.value_heads}
        numbers["ssm.group_count"] = model.key_heads
    for key, number in numbers.items():
        writer.add_uint32(f"{arch}.{key}", number)
    writer.add_float32(f"{arch}.rope.freq_base", model.base)
    writer.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", 1e-6)
    if model.sections:
        writer.add_array(f"{arch}.rope.dimension_sections", list(model.sections))
    random = np.random.default_rng(SEED)
    whole = list(tensors(model, layers))
    for number, (tensor, shape, kind) in enumerate(whole, 1):
        print(f"\rrandom: tensor {number} of {len(whole)}", end="\n" * (number == len(whole)), file=sys.stderr)
        made = values(random, tensor, shape, kind)
        writer.add_tensor(tensor, made, raw_dtype=None if kind is Kind.F32 else kind)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        step()
    writer.close()


def main() -> None:
    if len(sys.argv) != 4 or sys.argv[1] not in MODELS:
        sys.exit(f"random: got {' '.join(sys.argv[1:]) or 'nothing'}, expected NAME LAYERS FILE; {', '.join(MODELS)}")
    name, layers, path = sys.argv[1:]
    model = MODELS[name]
    least = model.recurrent or 1  # the first layer that attends
    if not layers.isdecimal() or not least <= int(layers) <= model.layers:
        sys.exit(f"random: got {layers} layers, expected {least} to {model.layers}, so that one attends")
    try:
        with replacing(Path(path)) as file:
            write(model, name, int(layers), Path(file.name))
    except OSError as error:
        sys.exit(f"random: {path}: cannot be written: {error.strerror or error}")


if __name__ == "__main__":
    main()
