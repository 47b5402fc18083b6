"""How a kernel of the graph is declared: its bindings, specialization constants and the fields of its parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from ...kernels.declarations import Access, Binding, KernelDecl

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


def kernel(
    name: str,
    bindings: dict[str, Access],
    spec: tuple[str, ...],
    params: tuple[Field, ...],
    extension: str | None = None,
) -> GraphKernel:
    """A kernel whose source is ``shaders/graph/NAME.comp``; extension: as ``KernelDecl`` has it."""
    bound = (Binding("params", "read"), *(Binding(one, access) for one, access in bindings.items()))
    decl = KernelDecl(name, f"graph/{name}.comp", bound, spec, module=f"graph_{name}", extension=extension)
    made = GraphKernel(decl, params)
    if made.words > PARAMS_WORDS:
        raise ValueError(f"{name}: {made.words} words of parameters, at most {PARAMS_WORDS}")
    return made


# Results in float32 and, as QUANTIZE makes it of them, as int8.
AS_INT8: Final[dict[str, Access]] = {"q": "write", "scales": "write"}
