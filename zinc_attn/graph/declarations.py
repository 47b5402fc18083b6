"""What the graph's kernels and their callers agree on: bindings, specialization constants and parameters.

Binding 0 of every kernel is its parameters, a record of at most PARAMS_WORDS words. Operands follow, then the result,
which may lie where an operand does unless a kernel says otherwise. GLSL, C and NumPy see the same record: ``glsl``,
``c`` and ``params_dtype`` are made of the fields here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from ..kernels.declarations import Access, Binding, KernelDecl

Kind = Literal["uint", "int", "float", "tensor"]
PARAMS_WORDS: Final = 64
TENSOR_WORDS: Final = 9  # offset, n[4], s[4]


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


@dataclass(frozen=True)
class GraphKernel:
    """A kernel of the graph: its declaration, and the fields of its parameters."""

    decl: KernelDecl
    params: tuple[Field, ...]

    @property
    def name(self) -> str:
        return self.decl.name

    @property
    def words(self) -> int:
        return sum(field.words for field in self.params)


def tensors(*names: str) -> tuple[Field, ...]:
    return tuple(Field(name, "tensor") for name in names)


def kernel(name: str, bindings: dict[str, Access], spec: tuple[str, ...], params: tuple[Field, ...]) -> GraphKernel:
    """A kernel whose source is ``shaders/graph/NAME.comp``."""
    bound = (Binding("params", "read"), *(Binding(one, access) for one, access in bindings.items()))
    made = GraphKernel(KernelDecl(name, f"graph/{name}.comp", bound, spec, module=f"graph_{name}"), params)
    if made.words > PARAMS_WORDS:
        raise ValueError(f"{name}: {made.words} words of parameters, at most {PARAMS_WORDS}")
    return made


# --- element by element -----------------------------------------------------------------------------------------------

BINARY_OPS: Final = ("add", "sub", "mul", "div")  # specialization constant op
# y = a op b; b's sizes divide a's, and it repeats. Grid: x = elements / 256, a row of y after another.
BINARY: Final = kernel("binary", {"a": "read", "b": "read", "y": "write"}, ("op",), tensors("a", "b", "y"))

GRAPH_KERNELS: Final = (BINARY,)
