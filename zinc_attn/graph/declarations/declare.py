"""How a kernel of the graph is declared: its bindings, specialization constants, fields of its parameters, grid."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final, Literal

from ...kernels.declarations import Access, Binding, KernelDecl

Kind = Literal["uint", "int", "float", "tensor"]
PARAMS_WORDS: Final = 64
TENSOR_WORDS: Final = 9  # offset, n[4], s[4]
# Grids of several kernels.
OF_ROWS: Final = "rows(p.x)"  # a workgroup has a row
OF_ELEMENTS: Final = "ceil_div(elements(p.y), 256)"  # an invocation has an element
OF_BLOCKS: Final = "ceil_div(rows({0}) * ceil_div({0}.n[0], 256), 4)"  # a workgroup has 32 blocks of whole superblocks


@dataclass(frozen=True)
class Field:
    """A field of a kernel's parameters; count: of an array, 0 for a single one."""

    name: str
    kind: Kind
    meaning: str = ""
    count: int = 0

    @property
    def words(self) -> int:
        return (TENSOR_WORDS if self.kind == "tensor" else 1) * (self.count or 1)


_FUNCTIONS: Final = {"elements": lambda x: math.prod(x.n), "rows": lambda x: math.prod(x.n[1:])}


@dataclass(frozen=True)
class GraphKernel:
    """A kernel of the graph: its declaration, and the fields of its parameters.

    Its grid is a formula of the parameters ``p``; ``elements`` and ``rows`` multiply all sizes, or sizes 1 to 3.
    """

    decl: KernelDecl
    params: tuple[Field, ...]

    def groups(self, spec: Sequence[int], words: Sequence[int]) -> tuple[int, int, int]:
        """The workgroups for values of the specialization constants and the words of the parameters."""
        p, begin = SimpleNamespace(), 0
        for field in self.params:
            values = words[begin : begin + field.words]
            value: Any = SimpleNamespace(n=values[1:5], s=values[5:]) if field.kind == "tensor" else values[0]
            setattr(p, field.name, values if field.count else value)
            begin += field.words
        return self.decl.groups(spec, p=p, **_FUNCTIONS)

    @property
    def name(self) -> str:
        return self.decl.name

    @property
    def words(self) -> int:
        return sum(field.words for field in self.params)


def tensors(*names: str) -> tuple[Field, ...]:
    return tuple(Field(name, "tensor") for name in names)


def kernel(
    name: str,
    bindings: dict[str, Access],
    spec: tuple[str, ...],
    params: tuple[Field, ...],
    grid: str | tuple[str, ...],
    extension: str | None = None,
) -> GraphKernel:
    """A kernel whose source is ``shaders/graph/NAME.comp``; extension: as ``KernelDecl`` has it."""
    bound = (Binding("params", "read"), *(Binding(operand, access) for operand, access in bindings.items()))
    module, grid = f"graph_{name}", (grid,) if isinstance(grid, str) else grid
    decl = KernelDecl(name, f"graph/{name}.comp", bound, spec, module=module, extension=extension, grid=grid)
    declared = GraphKernel(decl, params)
    if declared.words > PARAMS_WORDS:
        raise ValueError(f"{name}: {declared.words} words of parameters, at most {PARAMS_WORDS}")
    return declared


# Bindings of a result's int8 form, as QUANTIZE makes it.
AS_INT8: Final[dict[str, Access]] = {"q": "write", "scales": "write"}
