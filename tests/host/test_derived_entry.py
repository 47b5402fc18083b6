"""Shapes that no export has listed: the C library computes the package's numbers by the manifest's formulas."""

import subprocess

import pytest
from c_host import COMPILER, DTYPES, NATIVE, STRICT, needs_compiler

from zinc_attn.export import export, manifest
from zinc_attn.shapes import TILES, AttnShape, row_strides

SHAPES = ("9/3/64", "16/2/256", "20/1/576/512/latent", "32/32/128", "71/1/64", "5/1/40", "32/8/192/128", "3/1/65/33")
PLAIN = ("f16", "q8_0/q4_0", "f32/bf16", "iq4_nl/q5_1")
SOURCES = ("derive", "formula", "manifest", "json", "sha256", "error", "rows", "blocks", "floats", "storage")


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    built = tmp_path_factory.mktemp("derived") / "derived_entry"
    sources = [f"{NATIVE}/src/{name}.c" for name in SOURCES]
    here = __file__.replace("test_derived_entry.py", "derived_entry.c")
    subprocess.run([COMPILER, *STRICT, f"-I{NATIVE}/src", here, *sources, "-o", built, "-lm"], check=True)
    return built


@needs_compiler
@pytest.mark.parametrize("page_size", [1, 64])
def test_the_numbers_are_those_of_the_export(program, tmp_path, page_size):
    export(tmp_path)
    lines, entries = [], []
    for text in SHAPES:
        shape = AttnShape.parse(text)
        for dtype in PLAIN if not shape.latent else ("f16", "q8_0"):
            k, v = (dtype.split("/") * 2)[:2]
            sizes = (shape.q_heads, shape.kv_heads, shape.head_dim, shape.v_head_dim, int(shape.latent))
            for layout, strides in (("tiles", TILES), ("NHD", row_strides(shape, dtype))):
                lines.append(" ".join(map(str, (*sizes, DTYPES.index(k), DTYPES.index(v), *strides))))
                entry = manifest([shape], dtype=dtype, page_size=page_size, kv_layout=layout)
                entries.append(entry["shapes"][0])
    done = subprocess.run([program, tmp_path, str(page_size)], input="\n".join(lines), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = [dict(line.split() for line in block.splitlines()) for block in done.stdout.strip().split("\n\n")]
    for line, got, entry in zip(lines, found, entries, strict=True):
        sizes = {**entry["sizes"], "compute_units": 64}
        wanted = {name: sizes[name] for name in got if "." not in name}
        for kind, values in entry["kinds"].items():
            for family, constants in values["specialization"].items():
                wanted |= {f"{kind}.{family}.{name}": value for name, value in constants.items()}
        numbers = {name: int(value) for name, value in got.items() if not name.endswith(".gather")}  # the kernel's own
        assert numbers == wanted, line
