"""Multi-head latent attention in its absorbed form (DeepSeek-V2, 2024), which attends the compressed rows themselves.

A model's kv_b_proj expands a compressed row c, (kv_lora_rank,), to K_h c and V_h c for every head h. The part of a
score without positions is q . (K_h c) = (q K_h) . c, and a weighted sum of V_h c is V_h times the weighted sum of c. So
K_h multiplies the query and V_h the output, and all heads read c and the one rotated row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...canonical.state import F32
from ...errors import UnsupportedError
from ...shapes import AttnShape
from .tensors import DTYPES
from .upstream import torch


@dataclass(frozen=True, eq=False)
class Absorption:
    """Parts of a module's kv_b_proj: keys (heads, nope, kv_lora_rank), values (heads, v_head_dim, kv_lora_rank)."""

    keys: Any
    values: Any

    @classmethod
    def of(cls, module: Any, layer: int, expanded: AttnShape, compressed: tuple[int, int]) -> Absorption:
        """The parts of the projection of layer ``layer``'s module, as views of its weight.

        expanded: the shape of K and V that the model makes of the compressed rows of these sizes.
        UnsupportedError: the module has no plain linear projection of that shape.
        """
        rank, rotated = compressed
        sizes = expanded.head_dim - rotated, expanded.v_head_dim
        shape = expanded.q_heads * sum(sizes), rank
        projection: Any = getattr(module, "kv_b_proj", None)
        if not _is_plain(projection) or tuple(projection.weight.shape) != shape:
            raise UnsupportedError(
                f"layer {layer}: got {_described(projection)} as kv_b_proj of {type(module).__name__}, expected a "
                f"torch.nn.Linear without bias and hooks, whose weight is dense, of shape {shape} and of float32, "
                "float16 or bfloat16; merge adapters, dequantize the weight, or make the ZincCache without latent=True"
            )
        return cls(*projection.weight.detach().view(expanded.q_heads, sum(sizes), rank).split(sizes, dim=1))

    # Both products are computed in float32, also where the model's dtype is narrower. The exact q K_h lies nearest to
    # the scores that the model means; rounded to float16 or bfloat16, it adds an error of that size to every score, as
    # the model does when it rounds K_h c. Attention takes float32 queries and returns float32 sums in any case. The
    # einsums multiply once per head, with the rows of all batch rows, so that the weight is not repeated for each.

    def query(self, query: Any) -> Any:
        """(batch, heads, n, nope + rotated) as float32 (batch, heads, n, kv_lora_rank + rotated)."""
        plain, rotated = query.detach().float().tensor_split((self.keys.shape[1],), dim=-1)
        return torch.cat((_product("bhnd,hdr->bhnr", plain, self.keys), rotated), dim=-1)

    def output(self, out: F32) -> F32:
        """Sums of V (batch, n, heads, v_head_dim) from sums of compressed rows (batch, n, heads, kv_lora_rank)."""
        sums = torch.from_numpy(out).to(self.values.device)
        values: F32 = _product("bnhr,hvr->bnhv", sums, self.values).to("cpu").contiguous().numpy()
        return values


def _product(equation: str, x: Any, weight: Any) -> Any:
    """A product in float32, also under torch.autocast, which would narrow it."""
    with torch.autocast(x.device.type, enabled=False):
        return torch.einsum(equation, x, weight.float())


def _is_plain(projection: Any) -> bool:
    """Whether this is torch's own linear layer, with nothing around it that changes what it computes."""
    if type(projection) is not torch.nn.Linear or projection.bias is not None:
        return False
    weight = projection.weight
    dense = type(weight) in (torch.Tensor, torch.nn.Parameter) and weight.layout == torch.strided and not weight.is_meta
    return dense and not _is_hooked(projection) and weight.dtype in DTYPES


def _is_hooked(module: Any) -> bool:
    """Whether something runs with the module's forward, or in its place."""
    return bool("forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks)


def _described(projection: Any) -> str:
    """A module, and its weight if it has one, in an error message."""
    if projection is None:
        return "no module"
    weight = getattr(projection, "weight", None)
    text = f"a {type(projection).__name__}"
    if isinstance(weight, torch.Tensor):
        text += f" with a weight of shape {tuple(weight.shape)} and {weight.dtype}"
    text += " and a bias" if getattr(projection, "bias", None) is not None else ""
    return text + (" and hooks" if isinstance(projection, torch.nn.Module) and _is_hooked(projection) else "")
