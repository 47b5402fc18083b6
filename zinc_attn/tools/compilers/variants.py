"""The variants that are compiled: kernels with their specialization constants, as the shapes need them."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Final

from ...canonical.constants import KEYS_PER_LEAF, LEAVES_PER_NODE
from ...kernels import declarations as kernels
from ...kernels.dispatches import AttendVariant, MatrixVariant, encode_call, merge_call
from ...kernels.families import RDNA, Layout
from ...kernels.matrix import MatrixWorkgroup, matrix_workgroup
from ...kernels.tuning import SHARED_VECTORS, heads_together, merge_workgroup_size, shared_rows
from ...limits import WAVE
from ...planning.arithmetic import Arithmetic
from ...runtime.device import SPIRV
from ...shapes import TILES, AttnShape, row_strides
from ...storage import STORAGE
from ..cost.cards import FRAGMENT, RDNA4_UNITS

USUAL: Final = ("f32", "f16", "bf16", "q8_0")  # storage types that are compiled for every shape
FEW_SHAPES: Final = "16/2/256 32/8/128 9/3/64 20/1/576/512/latent"
_CONSTANT: Final[dict[Arithmetic, int]] = {
    "canonical": kernels.CANONICAL,
    "fused": kernels.FUSED_NATIVE,
    "integer": kernels.INTEGER_SUMS,
}
_CALLS: Final = ("attend_matrix", "attend", "encode", "merge")


@dataclass(frozen=True)
class Spec:
    """One variant of a kernel.

    kernel: merge, attend_DTYPE, attend_matrix_DTYPE or encode_DTYPE. head_dim: pass 2's is V's. heads: query
    vectors of a workgroup of pass 1, 0 for the other kernels. chunks: workgroups that share a KV head, which scales the
    issue estimate alone. softcap: 1 where scores are capped. rows: of a workgroup, which share keys. cells: K and V are
    rows of a host (kv_layout "NHD") in pages of one token.
    """

    kernel: str
    head_dim: int
    heads: int = 0
    chunks: int = 1
    softcap: int = 0
    rows: int = 1
    v_head_dim: int = None  # type: ignore[assignment]  # an int from __post_init__ on
    latent: bool = False
    arithmetic: Arithmetic = "canonical"
    cells: bool = False
    layout: Layout = RDNA

    def __post_init__(self) -> None:
        if self.v_head_dim is None:
            object.__setattr__(self, "v_head_dim", self.head_dim)

    @property
    def name(self) -> str:
        """kernel:dims:heads; :chunks:softcap:rows follows where softcap or rows is set."""
        more = (self.chunks, self.softcap, self.rows) if self.softcap or self.rows > 1 else ()
        parts = (self.kernel, self.dims, self.heads, *more)
        return ":".join(str(x) for x in parts if x or more) + self.said + ":cells" * self.cells

    @property
    def said(self) -> str:
        """The arithmetic, where it is not the canonical one."""
        return "" if self.arithmetic == "canonical" else f":{self.arithmetic}"

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
        """merge, encode, attend or attend_matrix."""
        return next(call for call in _CALLS if self.kernel.startswith(call))

    @property
    def lanes(self) -> int:
        decl, constants = self.program()
        return decl.wave(constants, self.layout.lanes)

    @property
    def kind(self) -> str:
        """The class of programs that a gate names."""
        if self.call == "attend" and self.heads > 8:
            return "shared"
        wide = self.call == "attend" and max(self.head_dim, self.v_head_dim) > 256
        return "wide" if wide else self.call.removeprefix("attend_")

    @property
    def dtype(self) -> str:
        """The storage type of K and V; empty for pass 2."""
        return self.kernel[len(self.call) + 1 :]

    def program(self) -> tuple[kernels.KernelDecl, tuple[int, ...]]:
        """The kernel and its specialization constants, from the dispatches that a discrete GPU is given."""
        call, shape, dtype, softcap = self.call, self.shape, self.dtype, bool(self.softcap)
        if call in ("merge", "encode"):
            dispatch = merge_call(shape, "discrete", 1) if call == "merge" else encode_call(shape, dtype, 1)
            return dispatch.decl, dispatch.spec
        if call == "attend_matrix":
            integer = self.arithmetic == "integer"
            variant = MatrixVariant(shape, dtype, FRAGMENT, self._matrix(), KEYS_PER_LEAF, softcap, integer=integer)
            return variant.program()
        common = "discrete", 1 if self.cells else KEYS_PER_LEAF, softcap
        strides = row_strides(shape, dtype) if self.cells else TILES
        return AttendVariant(
            shape,
            dtype,
            *common,
            strides=strides,
            rows=self.rows,
            heads=shape.group,
            arithmetic=_CONSTANT[self.arithmetic],
            walks=self.rows == 1,
            layout=self.layout,
        ).program()

    @property
    def waves(self) -> int:
        if self.call in ("merge", "attend_matrix"):
            return (merge_workgroup_size("discrete") if self.call == "merge" else self._matrix().size) // WAVE
        return LEAVES_PER_NODE if self.call == "attend" else 1

    def _matrix(self) -> MatrixWorkgroup:
        workgroup = matrix_workgroup(self.shape, RDNA4_UNITS, "discrete", self.heads, self.arithmetic == "integer")
        assert workgroup is not None  # RDNA4's LDS holds a strip of every size
        return workgroup


def specs_for(shape: AttnShape, softcap: int = 0, dtypes: Iterable[str] = USUAL, layout: Layout = RDNA) -> list[Spec]:
    """Every kernel as this shape uses it: pass 1 in each dtype, and pass 2."""
    specs = []
    for heads in sorted({heads_together(shape, most, layout) for most in (8, SHARED_VECTORS)}):
        sizes = heads, -(-shape.group // heads), softcap, 1, shape.v_head_dim, shape.latent
        specs += [Spec(f"attend_{dtype}", shape.head_dim, *sizes, layout=layout) for dtype in dtypes]
    return [*specs, Spec(kernels.MERGE.name, shape.v_head_dim, layout=layout)]


def default_specs() -> list[Spec]:
    """The variants that the preset models need, every other head_dim with groups of 4, and every storage type once."""
    text = "16/2/256 32/4/128 32/8/128 24/4/256 64/8/64 9/3/64 32/16/256 4/1/512 4/1/80 4/1/96 4/1/112 4/1/192"
    specs = [spec for shape in text.split() for spec in specs_for(AttnShape.parse(shape))]
    specs += specs_for(AttnShape.parse("16/8/256"), softcap=1)  # Gemma 2
    shared = "8/1/128 4/1/128 3/1/64 1/1/64 2/1/128 1/1/192 4/1/256 6/1/256 8/1/256 8/1/512"  # keys that rows share
    for shape in map(AttnShape.parse, shared.split()):
        if (rows := shared_rows(shape, RDNA4_UNITS.shared_bytes)) > 1:
            heads = shape.group * rows
            specs += [Spec(f"attend_{dtype}", shape.head_dim, heads, rows=rows) for dtype in USUAL]
    specs += specs_for(AttnShape.parse("16/2/256"), dtypes=STORAGE)
    order = [*(f"attend_{dtype}" for dtype in STORAGE), kernels.MERGE.name]
    return sorted(dict.fromkeys(specs), key=lambda spec: order.index(spec.kernel))


def attend_specs(shapes: str, dtypes: Iterable[str], layout: Layout, **how: Any) -> list[Spec]:
    """Pass 1 of these shapes, with other constants."""
    specs = [spec for text in shapes.split() for spec in specs_for(AttnShape.parse(text), 0, dtypes, layout)]
    return [replace(spec, **how) for spec in specs if spec.heads]


def matrix_specs() -> list[Spec]:
    """Pass 1 with matrix units for some shapes, for a full workgroup, and with every type that a cache has."""
    specs = []
    for text in ("16/2/256", "32/8/128", "9/3/64", "8/1/80", "20/1/576/512/latent", "32/8/192/128"):
        shape = AttnShape.parse(text)
        types = [name for name in STORAGE if name != "f32"] if text == "16/2/256" else ["f16", "q8_0"]
        dims = shape.head_dim, 64, 1, 0, 1, shape.v_head_dim, shape.latent
        specs += [Spec(f"attend_matrix_{name}", *dims) for name in types]
        integers = [name for name in types if STORAGE[name].integers]
        specs += [Spec(f"attend_matrix_{name}", *dims, arithmetic="integer") for name in integers]
    return specs


def encode_specs() -> list[Spec]:
    """The encoding of new rows to every quantized type, to a pair of types, and to rows of a latent shape."""
    names = (*(name for name, kind in STORAGE.items() if kind.quantized), "f16/q5_0", "q8_0/q4_0")
    latent = Spec("encode_q8_0", 576, v_head_dim=512, latent=True)
    return [*(Spec(f"encode_{name}", 256) for name in names), latent]


def all_specs(target: str = "gfx1201", layout: Layout = RDNA) -> list[Spec]:
    """The variants that the command compiles: for gfx1201 all, for other targets a few shapes and types, and none with
    matrix units. Integer attention has blocks of integers. Cells are rows of a host.
    """
    others = attend_specs(FEW_SHAPES, ("f16", "q8_0"), layout, arithmetic="fused")
    others += attend_specs(FEW_SHAPES, ("q8_0", "q4_0"), layout, arithmetic="integer")
    if target != "gfx1201":
        merge = Spec(kernels.MERGE.name, 256, layout=layout)
        return [*attend_specs(FEW_SHAPES, ("f16", "q8_0"), layout), *others, merge]
    cells = attend_specs("16/2/256", STORAGE, layout, cells=True)
    cells += attend_specs("9/3/64 8/1/72 8/1/65 20/1/576/512/latent", ("f16", "q8_0", "q4_0"), layout, cells=True)
    matrices = matrix_specs() if (SPIRV / kernels.MATRIX.file).exists() else []
    default = [replace(spec, layout=layout) if spec.call == "attend" else spec for spec in default_specs()]
    return default + others + cells + encode_specs() + matrices
