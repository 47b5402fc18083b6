"""The generated C of the library: ``zinc_contract.h`` and ``zinc_contract.c``, from the same facts as the GLSL.

The header has numbers, the work buffer's records, storage types, kernels with their bindings and constants, and the
sizes of a shape; the source has the formulas as functions, the SPIR-V, and a device's questions with their answers.
"""

import ast
import json
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

from .. import limits, storage
from ..canonical import constants
from ..canonical.constants import BIASES
from ..storage import IQ4_NL, STORAGE
from . import declarations, families, matrix, sizes, split_rule, tuning
from .contract import formulas, meanings
from .declarations import KernelDecl
from .expressions import to_c
from .formulas import Formulas
from .glsl import comments
from .questions import questions

_WIDTH: Final = 120  # of a line
# The kernels that the library runs; the package's other kernels are not embedded.
KERNELS: Final = (
    declarations.APPEND_KERNEL,
    declarations.MERGE,
    declarations.ATTEND,
    declarations.UNITS,
    declarations.ROUND,
    declarations.PRIMITIVES,
    declarations.MULTIPLY_ADD,
)
# The kernels whose constants follow from a shape, by family.
FAMILIES: Final = {
    "attend": declarations.ATTEND,
    "append": declarations.APPEND_KERNEL,
    "merge": declarations.MERGE,
    "round_q": declarations.ROUND,
}
_CONSTANTS: Final = {**FAMILIES, "attend_units": declarations.UNITS}  # families whose constants have a struct
_INTEGERS: Final = (
    *((constants, name) for name in ("KEYS_PER_LEAF", "LEAVES_PER_NODE", "KEYS_PER_NODE")),
    *((limits, name) for name in ("WAVE", "BLOCK", "MAX_HEAD_DIM", "MAX_Q_HEADS", "MAX_CONTEXT", "MAX_PAGE_SIZE")),
    *((limits, name) for name in ("MAX_HEADS_PER_WORKGROUP", "MAX_VALUE_PASSES")),
    *((declarations, name) for name in ("MERGE_DIMS", "FUSED_NATIVE", "FUSED_EMULATED", "INTEGER_SUMS")),
    *((tuning, name) for name in ("SHARED_VECTORS", "SHARED_ADDRESSES")),
    *((matrix, name) for name in ("LEAST_VECTORS", "MOST_VECTORS", "MATRIX_VECTORS", "MATRIX_GAIN")),
    (sizes, "LEAST_SHARED_BYTES"),
)
_REALS: Final = (
    *((constants, name) for name in ("MIN_INPUT", "MAX_INPUT", "MAX_SCORE", "LOG2E")),
    *((storage, name) for name in ("GROWTH", "FP8_UNIT", "FP8_MAX", "LEAST_SCALE", "MOST_SCALE")),
)
_FLOATS: Final = ("MIN_INPUT", "MAX_INPUT")  # the float32 numbers among these
_RECORDS: Final = ("HEADER", "ITEM", "ROW", "APPEND", "HEAD")
_GIVEN: Final = (  # fields that a caller fills: a shape, how its keys lie, and the device
    *("q_heads", "kv_heads", "head_dim", "v_head_dim", "latent", "page_size", "k_storage", "v_storage", "nhd"),
    *("compute_units", "lanes", "sums"),
)
_OF_TYPE: Final = {"bits": "bits", "halves": "halves", "fifth": "fifth_bits"}  # input k_bits is bits of K's type
_BY_HOST: Final = ("k_stride", "v_stride", "chunks", "rows_ahead", "pass_sums")  # kept if a host gave them
_OFF: Final = ("softcap", "arithmetic", "biases", "masked")  # inputs of constants, which calls set

_HEADER: Final = """\
#ifndef ZINC_CONTRACT_H
#define ZINC_CONTRACT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "zinc_attn.h"

static inline uint64_t za_min(uint64_t a, uint64_t b) {{ return a < b ? a : b; }}
static inline uint64_t za_max(uint64_t a, uint64_t b) {{ return a > b ? a : b; }}
static inline uint64_t za_ceil_div(uint64_t a, uint64_t b) {{ return a / b + (a % b != 0); }}

{numbers}
{records}
/* By enum za_dtype. */
struct storage_type {{
    const char *name;
    uint32_t bits;       /* of a value, without its fifth bit */
    uint32_t halves;     /* float16 numbers of a block: a scale, or a scale and a minimum; 0: no block type */
    uint32_t fifth_bits; /* 1: a block has a word of them, bit i its value i's */
    uint32_t head_scale; /* 1: a value is multiplied by the scale of its head */
    double most;         /* largest magnitude of a row; 0: MAX_INPUT */
}};
extern const struct storage_type za_storage[ZA_DTYPES];
extern const float za_iq4_nl[16];

/* What scores may have by query head, in the order of the bits of attend's constant: bytes of the member in za_call,
   (q_heads) slopes, and in za_room; the word of a HEAD record. */
extern const struct bias {{
    const char *name;
    size_t call, room, word;
}} za_biases[BIASES];

/* By their numbers: SPIR-V, how many buffers and specialization constants there are, and which buffers are written. */
extern const struct kernel {{
    const char *name, *module; /* that the processor's library knows */
    const uint32_t *code;
    size_t code_bytes;
    uint32_t bindings, constants, written; /* written: bit i is for binding i */
    uint32_t subgroups; /* 1: invocations meet in subgroups, of 32 or a wave of pass 1 */
}} za_kernels[KERNELS];

/* What a device is asked: a kernel's words, and the right answers. */
extern const struct question {{
    int kernel;
    const uint32_t *numbers, *results;
    uint32_t number_count, result_count, workgroups;
}} za_primitives, za_multiply_add;

{constants}
/* How pass 1 lies in a device's registers, by its family: of a vendor (PCI), the major version of its driver, and the
   invocations of its smallest subgroups. */
struct registers {{
    uint32_t lanes, chunks, rows_ahead, pass_sums, sums;
}};
struct registers za_registers_of(bool cpu, uint32_t vendor, uint32_t major, uint32_t subgroup);

/* Numbers of a shape, its types and a kind of device. Those up to cpu are given. */
struct sizes {{
{sizes}
}};

/* Fill in the sizes that follow from the caller's fields. A stride that is not 0 stays. */
void za_sizes(struct sizes *s);
{functions}

/* Bytes of shared memory of a workgroup of pass 1 that serves so many query vectors. */
uint64_t za_shared_bytes(const struct sizes *s, uint64_t vectors);

/* A workgroup of pass 1 with matrix units that serves so many query vectors, mat_m a strip: its invocations; how many,
   for every compute unit, keep a device busy without splits; whether it fits in `shared` bytes and so many
   invocations. */
uint64_t za_units_size(const struct sizes *s, uint64_t vectors, uint64_t mat_m);
uint64_t za_units_walks(const struct sizes *s, uint64_t vectors);
bool za_units_fit(const struct sizes *s, uint64_t vectors, uint64_t mat_m, uint64_t shared, uint64_t invocations);

/* The split rule: splits of so many nodes, for so many query rows of a sequence. */
uint64_t za_split_rule(const struct sizes *s, uint64_t nodes, uint64_t q_len);

/* Whether query rows of sequences attend the keys that they share together: `rows` of a sequence at most, by `items`
   workgroups of a KV head, whereby `saved` nodes of a KV head need not be read again. */
bool za_sharing_rule(const struct sizes *s, uint64_t rows, uint64_t items, uint64_t saved, bool fused);

#endif
"""

_SOURCE: Final = """\
#include "zinc_contract.h"

const struct storage_type za_storage[ZA_DTYPES] = {{
{types}
}};
{asserts}
const float za_iq4_nl[16] = {{{iq4_nl}}};

const struct bias za_biases[BIASES] = {{
{biases}
}};

static const struct {{
    struct registers layout;
    uint32_t vendor, major, subgroup;
}} families[] = {{
{families}
}};

struct registers za_registers_of(bool cpu, uint32_t vendor, uint32_t major, uint32_t subgroup) {{
    if (cpu) return (struct registers){{{cpu}}};
    int i = 0;
    while ((families[i].vendor && families[i].vendor != vendor) || families[i].major > major ||
           families[i].subgroup > subgroup)
        ++i;
    return families[i].layout;
}}

void za_sizes(struct sizes *s) {{
{sizes}
}}
{functions}
{rules}
{code}
const struct kernel za_kernels[KERNELS] = {{
{kernels}
}};
{questions}
"""


def generated(spirv: Path) -> dict[str, str]:
    """Text of the files by name. spirv: the folder of the compiled modules."""
    first = "/* Generated by scripts/build_contract.py from zinc_attn/kernels/, limits.py, storage.py and SPIR-V. */\n"
    sources = json.loads((spirv / "build.json").read_text(encoding="utf-8"))["sources_sha256"]
    same = f'\n#define ZA_SOURCES "{sources}" /* those of libzinc_cpu, too */\n'
    return {"zinc_contract.h": first + _header() + same, "zinc_contract.c": first + _source(spirv)}


def _lines(lines: Iterable[str]) -> str:
    return "\n".join(lines)


def _explained(line: str, meaning: str | None, indent: str = "    ") -> str:
    """A line of C with its meaning at its end, or above it where the line would be too long."""
    explained = f"{indent}{line} /* {meaning} */"
    if meaning and len(explained) <= _WIDTH:
        return explained
    above = textwrap.wrap(f"/* {meaning} */", _WIDTH - 7, subsequent_indent="   ") if meaning else []
    return textwrap.indent(_lines((*above, line)), indent)


def _fields(fields: Mapping[str, str]) -> str:
    """Fields, words, with their meanings."""
    return _lines(_explained(f"uint32_t {name};", meaning) for name, meaning in fields.items())


def _names(formula: str) -> set[str]:
    nodes = ast.walk(ast.parse(formula, mode="eval"))
    return {node.id for node in nodes if isinstance(node, ast.Name)} - {"max", "min", "ceil_div", "log2"}


def shape_sizes() -> dict[str, tuple[str, str]]:
    """(formula, meaning) of every size that follows from a shape, its types and a kind of device, in order."""
    table = dict(formulas("sizes"))
    for name, (formula, meaning) in formulas("quantities").items():
        if _names(formula) <= {*table, *_GIVEN, "kind"}:
            table[name] = formula, meaning
    return table


def size_fields() -> dict[str, str]:
    """{name: meaning} of the fields of struct sizes, in order."""
    inputs = {**meanings("inputs"), "cpu": "the kind of device"}
    inputs |= {"lanes": "invocations of a wave of pass 1", "sums": "of weighted values, in all passes of a wave"}
    fields = (*_GIVEN, "cpu", *(f"{side}_{name}" for side in "kv" for name in _OF_TYPE))
    return {name: inputs[name] for name in fields} | {name: meaning for name, (_, meaning) in shape_sizes().items()}


def _size(name: str) -> str:
    """The C for a name in a formula of sizes and constants."""
    kinds = {"kind_is_cpu": "s->cpu", "kind_is_gpu": "!s->cpu"}
    return "0" if name in _OFF else kinds.get(name, f"s->{name}")


def _kernel(decl: KernelDecl) -> str:
    return f"KERNEL_{decl.name.upper()}"


# --- the header -------------------------------------------------------------------------------------------------------


def _header() -> str:
    numbered = [
        _explained(f"{'bool' if name == 'cpu' else 'uint64_t'} {name};", x) for name, x in size_fields().items()
    ]
    functions = [f"struct {family}_constants za_{family}_constants(const struct sizes *s);" for family in _CONSTANTS]
    functions += [f"{_groups(family)};" for family in FAMILIES]
    return _HEADER.format(
        numbers=_lines(_numbers()),
        records=_lines(map(_record, _RECORDS)),
        constants=_lines(map(_constants, _CONSTANTS)),
        sizes=_lines(numbered),
        functions=_lines(functions),
    )


def _numbers() -> Iterator[str]:
    notes = comments()
    yield "enum {"
    for module, name in _INTEGERS:
        yield _explained(f"{name} = {getattr(module, name)},", notes.get(name))
    yield _explained(f"MAX_BINDINGS = {declarations.MAX_BINDINGS},", "of a kernel")
    yield f"    BIASES = {len(BIASES)},"
    yield from (f"    MAX_CONSTANTS = {max(len(decl.constant_names) for decl in KERNELS)}", "};", "enum {")
    yield from (*(f"    {_kernel(decl)}," for decl in KERNELS), "    KERNELS", "};")
    for module, name in _REALS:
        exact = re.sub(r"\.?0*p", "p", getattr(module, name).hex()) + ("F" if name in _FLOATS else "")
        yield _explained(f"#define {name} {exact}", notes.get(name), "")
    for name in ("NO_TOKEN", "HIDDEN"):
        yield _explained(f"#define {name} 0x{getattr(declarations, name):08X}U", notes[name], "")


def _record(record: str) -> str:
    words, size = getattr(declarations, record), getattr(declarations, f"{record}_WORDS")
    reserved = [f"    uint32_t reserved[{size - len(words)}];"] if size > len(words) else []
    return _lines((f"\nstruct work_{record.lower()} {{", _fields(words), *reserved, "};"))


def _constant_meanings(family: str) -> Mapping[str, tuple[str, str]]:
    """(formula, meaning) of a family's constants; attend_units has attend's, too."""
    return {**formulas("attend.constants"), **formulas(f"{family}.constants")}


def _constants(family: str) -> str:
    """The specialization constants of a family, and the places of its buffers."""
    decl, meaning = _CONSTANTS[family], _constant_meanings(family)
    places = ", ".join(f"{family.upper()}_BIND_{binding.name.upper()}" for binding in decl.bindings)
    first = f"/* The specialization constants of {decl.source}, in the order of their ids. */"
    fields = _fields({name: meaning[name][1] for name in decl.constant_names})
    return _lines((first, f"struct {family}_constants {{", fields, "};", f"enum {{ {places} }};", ""))


# --- the source -------------------------------------------------------------------------------------------------------


def _source(spirv: Path) -> str:
    order = '"enum za_dtype has the order of storage.py"'
    code = (module_words(spirv, decl) for decl in KERNELS)
    return _SOURCE.format(
        types=_lines(
            f"    [ZA_{kind.name.upper()}] = "
            f'{{"{kind.name}", {kind.bits}, {kind.halves}, {kind.fifth_bits:d}, {kind.head_scale:d}, {kind.most}}},'
            for kind in STORAGE.values()
        ),
        asserts=_lines(f"_Static_assert(ZA_{name.upper()} == {i}, {order});" for i, name in enumerate(STORAGE, 1)),
        iq4_nl=", ".join(map(str, IQ4_NL)),
        biases=_lines(map(_bias, BIASES)),
        families=_lines(map(_family, families.FAMILIES)),
        cpu=", ".join(map(str, families.CPU)),
        sizes=_lines(_size_statements()),
        functions=_lines((*map(_constants_function, _CONSTANTS), *map(_groups_function, FAMILIES))),
        rules=_lines(_rules()),
        code=_lines(code),
        kernels=_lines(kernel_entry(_kernel(decl), decl, decl.file.removesuffix(".spv")) for decl in KERNELS),
        questions=_lines(_questions()),
    )


def kernel_entry(number: str, decl: KernelDecl, code: str) -> str:
    """A kernel's entry of a table of struct kernel. code: the name of its ``module_words``."""
    written = sum((binding.access == "write") << i for i, binding in enumerate(decl.bindings))
    counts = f"{len(decl.bindings)}, {len(decl.constant_names)}, {written}, {int(decl.has_subgroups)}"
    return f'    [{number}] = {{"{decl.name}", "{code}", words_{code}, sizeof words_{code}, {counts}}},'


def module_words(spirv: Path, decl: KernelDecl) -> str:
    """A kernel's SPIR-V as an array of words; one word 0 if the compiler did not know the kernel's extension."""
    path = spirv / decl.file
    code = path.read_bytes() if path.exists() or decl.extension is None else bytes(4)
    words = (int.from_bytes(code[i : i + 4], "little") for i in range(0, len(code), 4))
    return _array(decl.file.removesuffix(".spv"), words)


def _array(name: str, words: Iterable[int]) -> str:
    text = [f"0x{word:08X}," for word in words]
    lines = ("    " + " ".join(text[i : i + 10]) for i in range(0, len(text), 10))
    return _lines((f"\nstatic const uint32_t words_{name}[] = {{", *lines, "};"))


def _bias(name: str) -> str:
    call, room, word = (f"offsetof(struct {record}, {name})" for record in ("za_call", "za_room", "work_head"))
    return f'    {{"{name}", {call}, {room}, {word} / 4}},'


def _family(family: families.Family) -> str:
    numbers = ", ".join(map(str, family.layout))
    return f"    {{{{{numbers}}}, {family.vendor:#x}, {family.major}, {family.subgroup}}}, /* {family.name} */"


def _size_statements() -> Iterator[str]:
    for side in "kv":
        kind = f"za_storage[1 + s->{side}_storage]"
        yield from (f"    s->{side}_{name} = {kind}.{field};" for name, field in _OF_TYPE.items())
    for name, (formula, _) in shape_sizes().items():
        unless = f"if (!s->{name}) " if name in _BY_HOST else ""
        yield f"    {unless}s->{name} = {to_c(formula, _size)};"


def _constants_function(family: str) -> str:
    decl = _CONSTANTS[family]
    values = {name: text for name, (text, _) in _constant_meanings(family).items()}
    values |= {name: str(value) for name, value in decl.fixed}
    first = f"\nstruct {family}_constants za_{family}_constants(const struct sizes *s) {{"
    lines = (f"        .{name} = (uint32_t)({to_c(values[name], _size)})," for name in decl.constant_names)
    return _lines((first, f"    return (struct {family}_constants){{", *lines, "    };", "}"))


def _groups(family: str) -> str:
    """The head of the function for a family's grid; its parameters are the grid's names that no shape has."""
    names = sorted(set().union(*map(_names, FAMILIES[family].grid)) - set(size_fields()))
    parameters = "".join(f"uint64_t {name}, " for name in names)
    return f"void za_{family}_groups(const struct sizes *s, {parameters}uint32_t groups[3])"


def _groups_function(family: str) -> str:
    known = size_fields()
    grid = (to_c(text, lambda name: _size(name) if name in known else name) for text in FAMILIES[family].grid)
    lines = (f"    groups[{i}] = (uint32_t)({count});" for i, count in enumerate(grid))
    return _lines((f"\n{_groups(family)} {{", *lines, "}"))


def _rules() -> Iterator[str]:
    vectors, split, sharing = sizes.SIZES, split_rule.SPLIT_RULE, split_rule.SHARING_RULE
    first = "uint64_t za_shared_bytes(const struct sizes *s, uint64_t vectors)"
    yield from _function(first, vectors, "SHARED_BYTES", {"VECTORS": "vectors", "LANES": "WAVE"})
    names = {"VECTORS": "vectors", "MAT_M": "mat_m", "SHARED": "shared", "INVOCATIONS": "invocations"}
    names |= {"UNROLLED": "(!s->cpu)", "INTEGER": "1"}
    first = "uint64_t za_units_size(const struct sizes *s, uint64_t vectors, uint64_t mat_m)"
    yield from _function(first, matrix.WORKGROUP_RULE, "SIZE", names)
    first = "uint64_t za_units_walks(const struct sizes *s, uint64_t vectors)"
    yield from _function(first, matrix.WORKGROUP_RULE, "WALKS", names)
    first = "bool za_units_fit(const struct sizes *s, uint64_t vectors, uint64_t mat_m, uint64_t shared, "
    yield from _function(f"{first}uint64_t invocations)", matrix.WORKGROUP_RULE, "FITS", names)
    first = "uint64_t za_split_rule(const struct sizes *s, uint64_t nodes, uint64_t q_len)"
    yield from _function(first, split, "SPLITS", {"NODES": "nodes", "Q_LEN": "q_len"})
    first = "bool za_sharing_rule(const struct sizes *s, uint64_t rows, uint64_t items, uint64_t saved, bool fused)"
    yield from _function(first, sharing, "PAYS", {x.upper(): x for x in ("rows", "items", "saved", "fused")})


def _function(first: str, rule: Formulas, result: str, c_names: Mapping[str, str]) -> Iterator[str]:
    """A C function for the formula ``result`` of a rule. c_names: the C for names of the rule."""
    needed = {result}
    for name, (formula, _) in reversed(rule.table.items()):
        needed |= _names(formula) if name in needed else set()
    terms = {name: name.lower() for name in rule.table} | {name: str(x) for name, x in rule.known.items()} | {**c_names}
    yield f"\n{first} {{"
    for name, (formula, _) in rule.table.items():
        if name in needed and name != result:
            yield f"    const uint64_t {name.lower()} = {to_c(formula, lambda x: terms.get(x, _size(x.lower())))};"
    yield from (f"    return {to_c(rule.table[result][0], lambda x: terms.get(x, _size(x.lower())))};", "}")


def _questions() -> Iterator[str]:
    numbers, results, triples, sums = questions()
    for decl, operands, expected in (
        (declarations.PRIMITIVES, numbers, results),
        (declarations.MULTIPLY_ADD, triples, sums),
    ):
        name = decl.name
        yield from (_array(f"{name}_numbers", operands), _array(f"{name}_results", expected))
        counts = f"{len(operands)}, {len(expected)}, {decl.grid[0]}"
        yield f"const struct question za_{name} = {{"
        yield f"    {_kernel(decl)}, words_{name}_numbers, words_{name}_results, {counts}}};"
