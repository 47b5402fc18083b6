"""The variants that are compiled: kernels with their specialization constants, as the shapes need them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ...canonical.constants import KEYS_PER_LEAF
from ...errors import ArgumentError
from ...kernels import declarations as kernels
from ...kernels.dispatches import AttendVariant, merge_call
from ...kernels.tuning import shared_rows
from ...shapes import AttnShape

FAMILIES: Final = {"gfx1201": "gfx1201", "gfx1200": "gfx1200", "gfx1100": "navi31"}  # to Mesa's name


@dataclass(frozen=True)
class Spec:
    """One variant of a kernel.

    heads: query vectors of a workgroup of pass 1, 0 for the merge kernel. chunks: workgroups that share a KV head; it
    scales the issue estimate and changes nothing else. softcap: 1 for the builds that cap scores. rows: query rows of a
    workgroup that share their keys.
    """

    kernel: str
    head_dim: int
    heads: int = 0
    chunks: int = 1
    softcap: int = 0
    rows: int = 1

    @property
    def name(self) -> str:
        """kernel:head_dim:heads, as --isa takes it; :chunks:softcap:rows follows where softcap or rows is set."""
        more = (self.chunks, self.softcap, self.rows) if self.softcap or self.rows > 1 else ()
        return ":".join(str(x) for x in (self.kernel, self.head_dim, self.heads, *more) if x or more)

    def program(self) -> tuple[kernels.KernelDecl, tuple[int, ...]]:
        """The kernel and its specialization constants, from the dispatches that a discrete GPU is given."""
        shape = AttnShape(max(self.heads // self.rows, 1), 1, self.head_dim)
        if self.kernel in kernels.ATTEND and self.heads:
            build, dtype, from_upload = kernels.ATTEND[self.kernel]
            variant = AttendVariant(
                shape,
                dtype,
                build,
                "discrete",
                KEYS_PER_LEAF,
                softcap=bool(self.softcap),
                from_upload=from_upload,
                rows=self.rows,
                heads=shape.group,
            )
            return variant.program()
        if self.kernel == kernels.MERGE.name and not self.heads:
            call = merge_call(shape, "discrete", 1)
            return call.decl, call.spec
        there = ", ".join((*kernels.ATTEND, kernels.MERGE.name))
        raise ArgumentError(f"variant: got {self.name}, expected a kernel of {there} with its constants")


def specs_for(shape: AttnShape, softcap: int = 0) -> list[Spec]:
    """Every kernel as this shape uses it: both builds of pass 1 in each dtype, and pass 2."""
    attend = (shape.heads_per_workgroup, shape.head_chunks, softcap)
    return [
        Spec(kernel.name, shape.head_dim, *(attend if "heads" in kernel.spec else ()))
        for kernel in kernels.KERNELS
        if kernel.spec[0] == "head_dim"
    ]


def default_specs() -> list[Spec]:
    """The variants that the preset models need, and every other head_dim with groups of 4."""
    text = "16/2/256 32/4/128 32/8/128 24/4/256 64/8/64 9/3/64 32/16/256 4/1/512 4/1/80 4/1/96 4/1/112 4/1/192"
    found = [spec for shape in text.split() for spec in specs_for(AttnShape.parse(shape))]
    found += specs_for(AttnShape.parse("16/8/256"), softcap=1)  # Gemma 2
    shared = "8/1/128 4/1/128 3/1/64 1/1/64 2/1/128 1/1/192 4/1/256 6/1/256 8/1/256 8/1/512"  # keys that rows share
    for shape in map(AttnShape.parse, shared.split()):
        rows = shared_rows("discrete", shape)
        attend = [kernel.name for kernel in kernels.KERNELS if "heads" in kernel.spec and rows > 1]
        found += [Spec(kernel, shape.head_dim, shape.group * rows, rows=rows) for kernel in attend]
    return sorted(dict.fromkeys(found), key=lambda spec: [k.name for k in kernels.KERNELS].index(spec.kernel))
