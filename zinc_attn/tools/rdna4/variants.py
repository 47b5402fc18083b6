"""The variants that are compiled: kernels with their specialization constants, as the shapes need them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from ...canonical.constants import KEYS_PER_LEAF, LEAVES_PER_NODE
from ...checks import parse_digits, shown
from ...dtypes import storage_dtype
from ...errors import ArgumentError
from ...kernels import declarations as kernels
from ...kernels.dispatches import AttendVariant, MatrixVariant, encode_call, merge_call
from ...kernels.matrix import MatrixWorkgroup, matrix_workgroup
from ...kernels.tuning import merge_workgroup_size, shared_rows
from ...limits import MAX_HEAD_DIM, WAVE
from ...shapes import AttnShape
from ...storage import STORAGE
from ..cost.cards import RDNA4_UNITS, TILE

FAMILIES: Final = {"gfx1201": "gfx1201", "gfx1200": "gfx1200", "gfx1100": "navi31"}  # to Mesa's name
# Shapes whose V is of another size than K: latent attention of 20 and of 64 heads, of a smaller K, and plain V of 128.
UNEQUAL_SHAPES: Final = ("20/1/576/512/latent", "64/1/576/512/latent", "32/1/320/256/latent", "32/8/192/128")

USUAL: Final = ("f32", "f16", "bf16", "q8_0")  # storage types that are compiled for every shape
_KERNEL: Final = re.compile(r"(?P<call>merge|encode|attend_(?:single|node|loop|matrix))(?:_(?P<dtype>.+))?")


@dataclass(frozen=True)
class Spec:
    """One variant of a kernel.

    kernel: merge, attend_BUILD_DTYPE, attend_matrix_DTYPE or encode_DTYPE. head_dim, v_head_dim, latent: as
    ``AttnShape`` has them; pass 2 knows V's size alone, which is its head_dim. heads: query vectors of a workgroup of
    pass 1, 0 for the other kernels.
    chunks: workgroups that share a KV head; it scales the issue estimate and changes nothing else. softcap: 1 for the
    builds that cap scores. rows: query rows of a workgroup that share their keys.
    """

    kernel: str
    head_dim: int
    heads: int = 0
    chunks: int = 1
    softcap: int = 0
    rows: int = 1
    v_head_dim: int = None  # type: ignore[assignment]  # an int from __post_init__ on
    latent: bool = False

    def __post_init__(self) -> None:
        if self.v_head_dim is None:
            object.__setattr__(self, "v_head_dim", self.head_dim)

    @classmethod
    def parse(cls, text: str) -> Spec:
        """A variant by its ``name``."""
        kernel, *parts = text.split(":")
        given = [parse_digits(part) for part in parts[1:]]
        numbers = [number for number in given if number is not None]
        try:
            if len(numbers) < len(given) or len(numbers) > 4 or 0 in numbers[3:]:
                raise ArgumentError("a number is none, or there are too many")
            shape = AttnShape.parse(f"1/1/{''.join(parts[:1])}")
        except ArgumentError:
            raise ArgumentError(
                f"isa: got {shown(text)}, expected KERNEL:HEAD_DIM:HEADS, or merge:HEAD_DIM; HEAD_DIM is at most "
                f"{MAX_HEAD_DIM}, and 192/128 or 576/512/latent where V is not like K"
            ) from None
        heads, chunks, softcap, rows = [*numbers, *(0, 1, 0, 1)[len(numbers) :]]
        return cls(kernel, shape.head_dim, heads, chunks, softcap, rows, shape.v_head_dim, shape.latent)

    @property
    def name(self) -> str:
        """kernel:dims:heads, as --isa takes it; :chunks:softcap:rows follows where softcap or rows is set."""
        more = (self.chunks, self.softcap, self.rows) if self.softcap or self.rows > 1 else ()
        return ":".join(str(x) for x in (self.kernel, self.dims, self.heads, *more) if x or more)

    @property
    def dims(self) -> str:
        """head_dim, with V's size and ``latent`` where a shape's text has them."""
        return str(AttnShape(1, 1, self.head_dim, self.v_head_dim, self.latent)).removeprefix("1/1/")

    @property
    def shape(self) -> AttnShape:
        """The query heads of a workgroup as a shape of one KV head."""
        return AttnShape(max(self.heads // self.rows, 1), 1, self.head_dim, self.v_head_dim, self.latent)

    @property
    def call(self) -> str:
        """merge, encode, attend_single, attend_node, attend_loop or attend_matrix; ArgumentError for another kernel."""
        parts = _KERNEL.fullmatch(self.kernel)
        call = parts["call"] if parts else ""
        if not call or (call == "merge") != (self.dtype is None) or (call in ("merge", "encode")) == (self.heads > 0):
            raise ArgumentError(
                f"variant: got {self.name}, expected attend_BUILD_DTYPE, BUILD single, node or loop, DTYPE as for "
                f"--dtype, or {kernels.MERGE.name}, with its constants"
            )
        return call

    @property
    def dtype(self) -> str | None:
        """The storage type of K and V; None for pass 2."""
        parts = _KERNEL.fullmatch(self.kernel)
        return storage_dtype(parts["dtype"]) if parts and parts["dtype"] else None

    @property
    def build(self) -> kernels.Build | None:
        """The build of pass 1 without matrix units; None for other kernels."""
        return next((build for build in kernels.BUILDS if self.call == f"attend_{build}"), None)

    def program(self) -> tuple[kernels.KernelDecl, tuple[int, ...]]:
        """The kernel and its specialization constants, from the dispatches that a discrete GPU is given."""
        call, shape, dtype, softcap = self.call, self.shape, str(self.dtype), bool(self.softcap)
        if call in ("merge", "encode"):
            one = merge_call(shape, "discrete", 1) if call == "merge" else encode_call(shape, dtype, 1)
            return one.decl, one.spec
        if self.build is None:
            return MatrixVariant(shape, dtype, TILE, self._matrix(), KEYS_PER_LEAF, softcap).program()
        common = self.build, "discrete", KEYS_PER_LEAF, softcap
        return AttendVariant(shape, dtype, *common, rows=self.rows, heads=shape.group).program()

    @property
    def waves(self) -> int:
        """Waves of a workgroup."""
        if self.call in ("merge", "attend_matrix"):
            return (merge_workgroup_size("discrete") if self.call == "merge" else self._matrix().size) // WAVE
        return LEAVES_PER_NODE if self.call == "attend_node" else 1

    def _matrix(self) -> MatrixWorkgroup:
        """The workgroup of pass 1 with matrix units."""
        found = matrix_workgroup(self.shape, RDNA4_UNITS, "discrete", self.heads)
        assert found is not None  # RDNA4's LDS holds a strip of every size
        return found


def _kernels(dtypes: Iterable[str], builds: Sequence[kernels.Build] = kernels.BUILDS) -> list[str]:
    """The names of pass 1's variants in some dtypes."""
    return [f"attend_{build}_{dtype}" for dtype in dtypes for build in builds]


def specs_for(shape: AttnShape, softcap: int = 0, dtypes: Iterable[str] = USUAL) -> list[Spec]:
    """Every kernel as this shape uses it: all builds of pass 1 in each dtype, and pass 2."""
    attend = (shape.heads_per_workgroup, shape.head_chunks, softcap, 1, shape.v_head_dim, shape.latent)
    return [
        *(Spec(kernel, shape.head_dim, *attend) for kernel in _kernels(dtypes)),
        Spec(kernels.MERGE.name, shape.v_head_dim),
    ]


def default_specs() -> list[Spec]:
    """The variants that the preset models need, every other head_dim with groups of 4, and every storage type once."""
    text = "16/2/256 32/4/128 32/8/128 24/4/256 64/8/64 9/3/64 32/16/256 4/1/512 4/1/80 4/1/96 4/1/112 4/1/192"
    found = [spec for shape in text.split() for spec in specs_for(AttnShape.parse(shape))]
    found += specs_for(AttnShape.parse("16/8/256"), softcap=1)  # Gemma 2
    shared = "8/1/128 4/1/128 3/1/64 1/1/64 2/1/128 1/1/192 4/1/256 6/1/256 8/1/256 8/1/512"  # keys that rows share
    for shape in map(AttnShape.parse, shared.split()):
        if (rows := shared_rows("discrete", shape)) > 1:
            names = _kernels(USUAL, ("single", "loop"))
            found += [Spec(kernel, shape.head_dim, shape.group * rows, rows=rows) for kernel in names]
    return _by_kernel(found + specs_for(AttnShape.parse("16/2/256"), dtypes=STORAGE))


def matrix_specs() -> list[Spec]:
    """Pass 1 with matrix units for some shapes, for a full workgroup, and with every type that a cache has."""
    found = []
    for text in ("16/2/256", "32/8/128", "9/3/64", "8/1/80", "20/1/576/512/latent", "32/8/192/128"):
        shape = AttnShape.parse(text)
        types = [name for name in STORAGE if name != "f32"] if text == "16/2/256" else ["f16", "q8_0"]
        dims = shape.head_dim, 64, 1, 0, 1, shape.v_head_dim, shape.latent
        found += [Spec(f"attend_matrix_{name}", *dims) for name in types]
    return found


def encode_specs() -> list[Spec]:
    """The encoding of new rows to every quantized type, to a pair of types, and to rows of a latent shape."""
    names = (*(name for name, one in STORAGE.items() if one.quantized), "f16/q5_0", "q8_0/q4_0")
    latent = Spec("encode_q8_0", 576, v_head_dim=512, latent=True)
    return [*(Spec(f"encode_{name}", 256) for name in names), latent]


def unequal_specs() -> list[Spec]:
    """The variants of ``UNEQUAL_SHAPES``."""
    return _by_kernel([spec for shape in UNEQUAL_SHAPES for spec in specs_for(AttnShape.parse(shape))])


def _by_kernel(specs: list[Spec]) -> list[Spec]:
    """Each spec once, in the order of the kernels."""
    order = [*_kernels(STORAGE), kernels.MERGE.name]
    return sorted(dict.fromkeys(specs), key=lambda spec: order.index(spec.kernel))
