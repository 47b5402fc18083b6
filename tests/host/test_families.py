"""Which registers pass 1 has on which device; compilers of these devices were seen to spill nothing, or little."""

import pytest

from zinc_attn.graph.declarations import MUL_MAT_VEC
from zinc_attn.kernels.declarations import MERGE
from zinc_attn.kernels.dispatches import AttendVariant
from zinc_attn.kernels.families import layout_of
from zinc_attn.kernels.sizes import attend_sizes
from zinc_attn.shapes import AttnShape

AMD, INTEL, NVIDIA = 0x1002, 0x8086, 0x10DE  # PCI
SHAPES = "16/2/256", "32/8/128", "9/3/64", "8/1/576"
# (vendor, driver's major version, smallest subgroup): by shape (lanes, heads, passes, chunks of K, rows of V).
DEVICES = {
    "gfx1201, RADV 25": ((AMD, 25, 32), ((32, 8, 1, 4, 8), (32, 4, 1, 4, 8), (32, 3, 1, 4, 8), (32, 8, 4, 4, 8))),
    "gfx1201, RADV 26": ((AMD, 26, 32), ((32, 8, 1, 4, 2), (32, 4, 1, 4, 2), (32, 3, 1, 4, 2), (32, 8, 4, 4, 2))),
    "Battlemage, ANV": ((INTEL, 26, 16), ((16, 2, 1, 2, 2), (16, 4, 1, 2, 2), (16, 3, 1, 2, 2), (32, 1, 2, 2, 1))),
    "DG2, ANV": ((INTEL, 26, 8), ((8, 1, 1, 2, 2), (8, 2, 1, 2, 2), (8, 3, 1, 2, 2), (32, 1, 4, 2, 2))),
    "H200, NVIDIA's driver": (
        (NVIDIA, 580, 32),
        ((32, 8, 2, 2, 4), (32, 4, 1, 2, 4), (32, 3, 1, 2, 4), (32, 4, 4, 2, 4)),
    ),
    "Mali": ((0x13B5, 26, 16), ((32, 8, 2, 2, 4), (32, 4, 1, 2, 4), (32, 3, 1, 2, 4), (32, 4, 4, 2, 4))),
}


@pytest.mark.parametrize(("facts", "wanted"), DEVICES.values(), ids=DEVICES)
def test_registers_of_a_device(facts, wanted):
    layout, rows = layout_of("discrete", *facts), []
    for text in SHAPES:
        shape = AttnShape.parse(text)
        decl, values = AttendVariant(shape, "f16", "discrete", 64, layout=layout).program()
        known = dict(zip(decl.spec, values, strict=True))
        lanes, heads = known["workgroup_size"] // 8, known["vectors"]
        sizes = attend_sizes(shape, heads, "f16", layout, lanes)
        rows.append((lanes, heads, sizes["VALUE_PASSES"], known["chunks_ahead"], sizes["KEYS_AHEAD"]))
        assert decl.wave(values) == lanes
        assert (MERGE.wave((64, 256), layout.lanes), MUL_MAT_VEC.decl.wave((), layout.lanes)) == (layout.lanes, 32)
        assert (known["rows_ahead"], known["pass_sums"]) == (layout.rows_ahead, layout.pass_sums)
    assert tuple(rows) == wanted


def test_a_cpu_has_its_own():
    assert layout_of("cpu", INTEL, 26, 8) == (32, 1, 4, 2048, 8192)
