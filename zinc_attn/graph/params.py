"""A kernel's parameters as NumPy, GLSL and C see them, from one declaration."""

from collections.abc import Iterator
from typing import Final

from ..kernels.declarations import KernelDecl
from ..kernels.expressions import to_c, to_glsl
from ..kernels.glsl import glsl_float, numbered
from . import constants
from .declarations import FLOAT_VEC, GRAPH_KERNELS, PARAMS_WORDS, ROPE_WORDS, Field, GraphKernel
from .declarations.recurrent import LANES_OF_STATE
from .pieces import GROUP, TYPES

_HEAD: Final = "Generated from zinc_attn/graph/ by scripts/build_shaders.py."
_C_TYPES: Final = {"uint": "uint32_t", "int": "int32_t", "float": "float", "tensor": "struct tensor"}
GROUPS: Final = "void za_graph_groups(int kernel, const void *constants, const void *params, uint32_t groups[3])"
UNITS_TILE: Final = "bool za_units_tile(struct mul_mat_units_constants *c, uint32_t subgroup, bool on_cpu, bool small)"
_DEFAULTS: Final = {"size": 32, "tile": 64, "own": 4, "mat": 16}  # of constants, by the begin of their names; others 1
_GLSL_TYPES: Final = {"uint": "uint", "int": "int", "float": "float", "tensor": "Tensor"}
TENSOR: Final = (
    Field("offset", "uint", "place of element 0 in the binding; all these numbers count elements of the tensor's type"),
    Field("n", "uint", "elements of each dimension, ggml's ne", 4),
    Field("s", "uint", "steps from an element to the next of each dimension, ggml's nb", 4),
)


def records() -> Iterator[GraphKernel]:
    """The first kernel of each record of parameters, which gives the record its name."""
    known: set[tuple[Field, ...]] = set()
    for kernel in GRAPH_KERNELS:
        if kernel.params not in known:
            yield kernel
        known.add(kernel.params)


def struct_name(kernel: GraphKernel) -> str:
    """UnaryParams."""
    return "".join(part.capitalize() for part in kernel.name.split("_")) + "Params"


def _field(field: Field, types: dict[str, str]) -> str:
    return f"    {types[field.kind]} {field.name}{f'[{field.count}]' if field.count else ''};"


def _fields(fields: tuple[Field, ...], types: dict[str, str], comment: str) -> Iterator[str]:
    for field in fields:
        yield _field(field, types) + (comment.format(field.meaning) if field.meaning else "")


def _constants() -> Iterator[str]:
    """The numbers of constants.py; polynomials as macros of precise y and x, by Horner's rule."""
    for name, value in vars(constants).items():
        if not name.isupper():
            continue
        if isinstance(value, int):
            yield f"const uint {name} = {value:#x}u;" if value > 999 else f"const uint {name} = {value}u;"
        elif isinstance(value, float):
            yield f"#define {name} {glsl_float(value)}"
        elif isinstance(value[0], int) and len(value) == 4:
            yield f"const uvec4 {name} = uvec4({', '.join(f'0x{word:08X}u' for word in value)});"
        elif isinstance(value[0], int):
            words = ", ".join(f"0x{word & 0xFFFFFFFF:08X}u" for word in value)
            yield f"const uint {name}[{len(value)}] = {{{words}}};"
        else:
            steps = (f"y = y * x; y = y + {glsl_float(c)};" for c in reversed(value[:-1]))
            yield f"#define {name}(y, x) y = {glsl_float(value[-1])}; {' '.join(steps)}"


def glsl() -> str:
    """shaders/graph/contract.glsl."""
    lines = [f"// {_HEAD}", "", *_constants(), f"const uint ROPE_WORDS = {ROPE_WORDS}u;"]
    lines += ["", "struct Tensor {", *_fields(TENSOR, _GLSL_TYPES, "  // {}"), "};"]
    for kernel in records():
        lines += ["", f"struct {struct_name(kernel)} {{", *_fields(kernel.params, _GLSL_TYPES, "  // {}"), "};"]
    lines.append("")
    for kernel in GRAPH_KERNELS:
        upper = kernel.name.upper()
        lines += numbered(f"{upper}_BIND", (binding.name for binding in kernel.decl.bindings))
        each = [_constant(i, name) for i, name in enumerate(kernel.decl.spec)]
        pairs = [" ".join(each[i : i + 2]) for i in range(0, len(each), 2)]
        lines += [" \\\n    ".join([f"#define {upper}_CONSTANTS", *pairs])] if each else []
    lines += ["", *(f"const uint {name} = {value}u;" for name, value in sizes().items())]
    for name, values in enumerations().items():
        lines += numbered(name, values)
    lines += ["", "// For a type of weights: pieces of 16 bytes and of 4 bytes, and values and bytes of a block."]
    lines += [_by_type("PIECES_16", [kind.count(16) for kind in TYPES.values()])]
    lines += [_by_type("PIECES_4", [kind.count(4) for kind in TYPES.values()])]
    lines += [_by_type("VALUES", [kind.values for kind in TYPES.values()])]
    lines += [_by_type("SIZE", [kind.size for kind in TYPES.values()])]
    lines += ["// For a type of weights: whether a scale has 16 values, and whether there are minima."]
    lines += [_by_type("HALVES", [int(kind.halves) for kind in TYPES.values()])]
    lines += [_by_type("MINIMUM", [int(kind.minimum) for kind in TYPES.values()])]
    lanes = to_glsl(LANES_OF_STATE).replace("size", "(size)")
    lines += [f"const uint WEIGHT_GROUP = {GROUP}u;", f"#define LANES_OF_STATE(size) ({lanes})"]
    return "\n".join(lines) + "\n"


def _constant(i: int, name: str) -> str:
    """The declaration of specialization constant i."""
    if name == "workgroup_size":
        return f"layout(local_size_x_id = {i}, local_size_x = 64) in;"
    return f"layout(constant_id = {i}) const uint {name.upper()} = {_DEFAULTS.get(name.partition('_')[0], 1)}u;"


def _by_type(name: str, values: list[int]) -> str:
    """A macro that is constant where the type is: of WEIGHT_TYPE t, values[t]."""
    chosen = "".join(f"(t) == {t}u ? {value}u : " for t, value in enumerate(values[:-1]))
    return f"#define WEIGHT_{name}(t) ({chosen}{values[-1]}u)"


def c_header() -> str:
    """zinc_graph.h: the records, the places of buffers and constants, and the kernels' numbers."""
    lines = [f"/* {_HEAD} */", "#ifndef ZINC_GRAPH_H", "#define ZINC_GRAPH_H", '#include "zinc_contract.h"', ""]
    sizes_text = f"GRAPH_PARAMS_WORDS = {PARAMS_WORDS}, ROPE_WORDS = {ROPE_WORDS}, SUPERBLOCK = {constants.SUPERBLOCK}"
    lines += [f"#define FLOAT_VEC_{name}(k) ({to_c(x, lambda _: '(k)')})" for name, (x, _) in FLOAT_VEC.table.items()]
    lines += [f"enum {{ {sizes_text} }};", "struct tensor {"]
    lines += [*_fields(TENSOR, _C_TYPES, " /* {} */"), "};"]
    for kernel in records():
        lines += ["", f"struct {kernel.name}_params {{", *_fields(kernel.params, _C_TYPES, " /* {} */"), "};"]
    for kernel in GRAPH_KERNELS:
        upper = kernel.name.upper()
        numbers = (f"{upper}_BIND_{binding.name.upper()}" for binding in kernel.decl.bindings)
        lines.append(f"enum {{ {', '.join(numbers)} }};")
        if kernel.decl.spec:
            lines += [f"struct {kernel.name}_constants {{", *(f"    uint32_t {name};" for name in kernel.decl.spec)]
            lines.append("};")
    lines += ["", f"enum {{ {', '.join(f'{name} = {value}' for name, value in sizes().items())} }};"]
    for name, values in enumerations().items():
        lines += ["", f"enum {{ {', '.join([*(f'{name}_{value.upper()}' for value in values), f'{name}S'])} }};"]
    kernels = (f"    GRAPH_{kernel.name.upper()}," for kernel in GRAPH_KERNELS)
    lines += ["", "enum {", *kernels, "    GRAPH_KERNELS", "};"]
    lines += [
        "extern const struct kernel za_graph_kernels[GRAPH_KERNELS];",
        "",
        "/* The workgroups of a kernel along x, y and z; one is 0 where its result is empty. */",
        f"{GROUPS};",
        "",
        "/* A quantized type of weights, by enum WEIGHT_TYPE: layout R32 of zinc_attn/graph/pieces.py. */",
        f"enum {{ WEIGHT_GROUP = {GROUP} }};",
        "struct weight_type {",
        "    const char *name;",
        "    uint32_t values, bytes; /* of a block */",
        "    bool halves, minimum; /* scales of 16 values; minima */",
        "    uint32_t ahead; /* superblocks that a wave loads before it uses them */",
        "    struct { uint32_t offset, size, count; } runs[3]; /* of pieces; count 0: no more */",
        "};",
        "extern const struct weight_type za_weight_types[WEIGHT_TYPES];",
        "",
        "/* Sets the tile of constants with type and matrices: zinc_attn/graph/units.py. False: not this type. */",
        f"{UNITS_TILE};",
    ]
    return "\n".join([*lines, "#endif", ""])


def enumerations() -> dict[str, tuple[str, ...]]:
    """Values of specialization constants and parameters, by the prefix of their names."""
    from . import declarations

    return {
        name.removesuffix("S"): value for name, value in vars(declarations).items() if name.endswith(("OPS", "TYPES"))
    }


def sizes() -> dict[str, int]:
    """Sizes that kernels and their callers share."""
    from . import declarations

    return {name: value for name, value in vars(declarations).items() if name.endswith(("_PIECE", "_MOST"))}


def modules() -> tuple[KernelDecl, ...]:
    return tuple({kernel.decl.file: kernel.decl for kernel in GRAPH_KERNELS}.values())
