"""Which versions of ggml native/ggml/interface.cpp binds, how it tells their interfaces apart, and what it refuses,
by small libraries that call themselves a ggml."""

import ctypes as c
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from c_host import COMPILER, needs_compiler

ROOT = Path(__file__).resolve().parents[2]
GGML = ROOT / "native" / "ggml"
STUB = ROOT / "tests" / "ggml"
PLUGIN = """
#include "interface.h"
extern "C" { int tensor_bytes = sizeof(ggml_tensor); }
extern "C" int plugin(void **fields) {  // the API that was bound, or 0
    if (!zinc::bind(__builtin_return_address(0))) return 0;
    zinc::BufferType type = {};
    const zinc::TypeFunctions functions = {
        reinterpret_cast<const char *(*)(ggml_backend_buffer_type_t)>(1),
        reinterpret_cast<ggml_backend_buffer_t (*)(ggml_backend_buffer_type_t, size_t)>(2),
        reinterpret_cast<size_t (*)(ggml_backend_buffer_type_t)>(3),
        reinterpret_cast<bool (*)(ggml_backend_buffer_type_t)>(4)};
    fill(&type, functions, nullptr, reinterpret_cast<ggml_backend_dev_t>(5));
    for (int i = 0; i < 10; ++i) fields[i] = type.fields[i];
    return zinc::api_version();
}
"""
functions = re.findall(r"X\((ggml_\w+)\)", (GGML / "interface.cpp").read_text())
operations = re.findall(r"GGML_OP_(\w+)", re.search(r"enum ggml_op \{.*?\}", (STUB / "ggml.h").read_text(), re.S)[0])
pytestmark = needs_compiler


@pytest.fixture(scope="module")
def plugin(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plugin")
    (folder / "plugin.cpp").write_text(PLUGIN)
    for name in ("ggml-backend.h", "ggml-backend-impl.h"):
        (folder / name).write_text('#include "ggml.h"\n')
    sources = folder / "plugin.cpp", GGML / "interface.cpp", GGML / "say.cpp"
    options = "-std=c++17", "-shared", "-fPIC", "-fvisibility-inlines-hidden", "-Wall", "-Wextra", "-Werror"
    folders = (f"-I{path}" for path in (STUB, folder, GGML))
    subprocess.run(["c++", *options, *folders, *sources, "-o", folder / "plugin.so", "-ldl"], check=True)
    return folder / "plugin.so"


def bound(plugin: Path, folder: Path, version: str, marks: tuple[str, ...], without: str = "", change=("\0", "")):
    """What the plugin tells a library that calls itself ggml of that version: the API and a buffer type's fields.

    change: a text of the library's source, and the text in its place.
    """
    library = c.CDLL(shutil.copy(plugin, folder / "plugin.so"))  # which binds once
    size = c.c_int.in_dll(library, "tensor_bytes").value
    answers = {
        "ggml_version": f'const char *ggml_version(void) {{ return "{version}"; }}',
        "ggml_op_name": "const char *ggml_op_name(int i) { return names[i]; }",
        "ggml_type_name": "const char *ggml_type_name(int i) "
        '{ return !i ? "f32" : i == 2 ? "bf16" : i == 14 ? "mxfp4" : "q6_K"; }',
        "ggml_unary_op_name": 'const char *ggml_unary_op_name(int i) { return i == 21 ? "TRUNC" : ""; }',
        "ggml_glu_op_name": 'const char *ggml_glu_op_name(int i) { return i == 6 ? "SWIGLU_CLAMP" : ""; }',
        "ggml_tensor_overhead": f"unsigned long ggml_tensor_overhead(void) {{ return {size + 32}; }}",
    }
    names = ", ".join(f'"{name}"' for name in operations)
    lines = [f"static const char *names[] = {{{names}}};"]
    lines += [answers.get(name, f"void {name}(void) {{}}") for name in (*functions, *marks) if name != without]
    lines += ["int load(int (*plugin)(void **), void **fields) { int api = plugin(fields); return api; }"]
    (folder / "ggml.c").write_text("\n".join(lines).replace(*change))
    subprocess.run([str(COMPILER), "-shared", "-fPIC", folder / "ggml.c", "-o", folder / "any-name.so"], check=True)
    return asked(folder / "any-name.so", library)


def asked(ggml: Path, plugin: c.CDLL) -> tuple[int, list[int]]:
    fields = (c.c_void_p * 10)()
    api = c.CDLL(str(ggml)).load(plugin.plugin, fields)
    return api, [field or 0 for field in fields]


EXPAND, ALLOC_N = "ggml_op_alloc_size_may_expand", "ggml_backend_buft_alloc_buffer_n"


@pytest.mark.parametrize("version", ["0.25.1", "0.25.3", "0.26.0", "0.27.0"])
@pytest.mark.parametrize(
    ("marks", "api", "fields"),
    [((EXPAND,), 2, [1, 2, 3, 0, 0, 4, 5]), ((EXPAND, ALLOC_N), 3, [1, 2, 0, 3, 0, 0, 0, 4, 5])],
)
def test_an_interface_is_told_by_what_it_exports(plugin, tmp_path, version, marks, api, fields):
    assert bound(plugin, tmp_path, version, marks) == (api, fields + [0] * (10 - len(fields)))


@pytest.mark.parametrize(
    ("version", "options", "said"),
    [
        ("0.24.9", {}, ""),
        ("0.28.0", {}, ""),
        ("0.26.0", {"marks": ()}, "got ggml 0.26.0, whose interface is unknown; take a release"),
        ("0.26.0", {"without": "ggml_nbytes"}, "got a ggml without ggml_nbytes, expected ggml 0.25 to 0.27 as a"),
        *(
            ("0.26.0", {"change": (old, new)}, f"got ggml 0.26.0, whose {text} is not that of the headers")
            for old, new, text in (
                ('"SUM"', '"SUM_ALL"', "SUM"),
                *((f'"{kind}"', '"any"', kind) for kind in ("f32", "bf16", "q6_K", "mxfp4")),
                ('"TRUNC"', '"CUT"', "TRUNC"),
                ('"SWIGLU_CLAMP"', '"SWIGLU"', "SWIGLU_CLAMP"),
                ("ggml_tensor_overhead(void) { return", "ggml_tensor_overhead(void) { return 8 +", "size of a tensor"),
            )
        ),
    ],
)
def test_any_other_is_refused_in_a_line(plugin, tmp_path, capfd, version, options, said):
    assert bound(plugin, tmp_path, version, **{"marks": (EXPAND,)} | options) == (0, [0] * 10)
    (line,) = capfd.readouterr().err.splitlines()
    said = said or f"got ggml {version}, expected 0.25 to 0.27; take a llama.cpp with one of these"
    assert line.startswith(f"ggml-zinc: {said}")


def test_every_operation_of_the_back_end_is_compared():
    sources = "".join(path.read_text() for path in GGML.glob("*.[ch]*"))
    compared = re.findall(r"OP\((\w+)\)", re.search(r"OPERATIONS\[\] = \{.*?\};", sources, re.S)[0])
    assert {*re.findall(r"GGML_OP_([A-Z]\w*)", sources)} - {"COUNT"} == {*compared}
