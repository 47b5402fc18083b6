"""The shipped kernels keep their gates under the compilers of GPUs, and a gate that is broken is said in a sentence."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
from support import FULL, needs_radv

from zinc_attn.cli import app as cli
from zinc_attn.errors import ArgumentError, NoVulkanError
from zinc_attn.shapes import AttnShape
from zinc_attn.tools.compilers import TARGETS, Compiler, compiler, gates, graph, isa, targets, variants
from zinc_attn.tools.compilers.gates import Compiled, VariantReport
from zinc_attn.tools.compilers.variants import Spec

STATISTICS = {
    **{"VGPRs": 96, "SGPRs": 128, "Spilled VGPRs": 0, "Spilled SGPRs": 0},
    **{"LDS size": 2560, "Scratch size": 0, "Subgroups per SIMD": 10, "Instructions": 9, "Latency": 99},
}
ATTEND = Spec("attend_f16", 256, 8)
LATENT = Spec("attend_f16", 576, 4, 5, v_head_dim=512, latent=True)
OTHERS = ("32/4/128", "32/1/320/256/latent", "32/8/192/128")  # of which a third is compiled, and with --full all


def compiled(wave=32, name="gfx1201", mesa=25, **changed):
    statistics = STATISTICS | {key.replace("_", " "): value for key, value in changed.items()}
    return Compiled.read({"mesa": mesa, "wave": wave, "statistics": statistics}, Compiler(name))


def reported(spec=ATTEND, **changed):
    return VariantReport(compiled(**changed), spec, None, None)


@pytest.fixture(scope="module")
def with_compiler():
    needs_radv()


@pytest.mark.usefixtures("with_compiler")
def test_shipped_kernels_keep_their_gates():
    others = [spec for shape in OTHERS for spec in variants.specs_for(AttnShape.parse(shape))]
    specs = variants.specs_for(AttnShape(16, 2, 256)) + variants.encode_specs() + (others if FULL else others[::3])
    reports = compiler.compile_variants(specs)
    assert [r.spec for r in reports] == specs
    assert list(gates.violations(reports)) == []
    for r in reports:
        assert 0 < r.compiled.statistics["Instructions"] < r.compiled.statistics["Code size"]
        assert (r.issue_per_key is None) == (r.spec.call in ("merge", "encode")), r.spec.name
    columns, lines = gates.table(reports)
    assert len(lines) == len(specs) and {len(line) for line in lines} == {len(columns)}


@pytest.mark.usefixtures("with_compiler")
def test_the_kernels_of_the_graph_keep_their_gates():
    assert list(graph.graph_violations()) == []
    spilling = compiled(64, VGPRs=97, Spilled_VGPRs=2, LDS_size=(32 << 10) + 4)
    sentences = list(spilling.broken("norm [0, 1, 1]", "vec", graph.MOST_SHARED))
    matrices = "BB1:\n v_wmma_i32_16x16x16_iu8 v[0:7]\n v_dual_add_f32 v1 :: v_dual_mul_f32 v2\n ds_load_b32 v0"
    assert graph.unit_cycles((0, 64, 64, 2, 2), f"BB0:\n v_mov_b32 v0, 0\n{matrices}") == 18
    kinds = [graph.kind(kernel, spec) for kernel, spec in graph.graph_programs() if kernel.name == "mul_mat_vec"]
    assert {"vec", "graph"} == set(kinds) and graph.kind(*graph.graph_programs()[0]) == "graph"
    assert [sentence.split(": ")[1] for sentence in sentences] == [
        *("2 spilled registers, at most 0 allowed", "32772 LDS bytes, at most 32768 allowed"),
        *("97 registers, at most 96 allowed", "wave64, wave32 needed"),
    ]


WIDE_V = Spec("attend_f16", 128, 8, v_head_dim=320)
INTEGER = Spec("attend_matrix_q8_0", 64, 64, arithmetic="integer")
VIOLATIONS = (
    *((reported(spec, VGPRs=most), "") for spec, most in ((ATTEND, 120), (LATENT, 192))),
    (reported(VGPRs=144), "attend_f16:256:8: 144 registers, at most 120 allowed"),
    (reported(LATENT, VGPRs=193), "attend_f16:576/512/latent:4: 193 registers, at most 192 allowed"),
    (reported(WIDE_V, VGPRs=193), "attend_f16:128/320:8: 193 registers, at most 192 allowed"),
    (reported(Spec("attend_f16", 64, 24, rows=8), VGPRs=257), "attend_f16:64:24:1:0:8: 257 registers, at most 256"),
    (reported(Spec("merge", 512), VGPRs=144), "merge:512: 144 registers, at most 120 allowed"),
    (reported(Spec("attend_matrix_f16", 64, 64)), "attend_matrix_f16:64:64: no instruction of the matrix units"),
    (replace(reported(INTEGER), wmma=1, leaf=160.0), ""),
    (replace(reported(INTEGER), wmma=1, leaf=160.5), f"{INTEGER.name}: 160.5 issue cycles a key, at most 160 allowed"),
    (replace(reported(INTEGER), wmma=1), f"{INTEGER.name}: None issue cycles a key, at most 160 allowed"),
    (reported(wave=64), "attend_f16:256:8: wave64, wave32 needed"),
    (reported(Spilled_SGPRs=3), "attend_f16:256:8: 3 spilled registers, at most 0 allowed"),
    (reported(Scratch_size=8), "attend_f16:256:8: 8 scratch bytes, at most 0 allowed"),
    (reported(LDS_size=18944), "attend_f16:256:8: 18944 LDS bytes, at most 18432 allowed"),
)


@pytest.mark.parametrize(("report", "text"), VIOLATIONS)
def test_violations(report, text):
    result = list(gates.violations([report]))
    assert len(result) == bool(text) and "".join(result).startswith(text)
    both = list(gates.violations([reported(Spilled_VGPRs=2, LDS_size=18944), report]))
    assert len(both) == 2 + len(result), "every broken gate of every variant has a sentence"


def test_the_waves_that_a_simd_holds():
    """By registers, of AMD's chips and others; by the shared memory of eight waves."""
    told = {"gfx1201": {96: 16, 97: 12, 120: 12, 144: 10, 192: 8, 256: 5}, "gfx1030": {64: 16, 65: 14, 128: 8}}
    told |= {"hopper": {24: 16, 168: 3}, "ada": {24: 12, 168: 3}}
    for name, waves in told.items():
        assert {registers: TARGETS[name].family.waves(registers) for registers in waves} == waves, name
    shared = {0: 16, 1: 16, 16384: 16, 16385: 256 / 17, 32768: 8}
    assert {size: reported(LDS_size=size).waves_by_lds for size in shared} == shared


@pytest.mark.parametrize(("end", "cycles"), [("s_cbranch_scc1 BB1", 26), ("s_cbranch_scc0 BB2\n s_branch BB1", None)])
def test_the_cycles_of_a_leaf(end, cycles):
    """Of the loop over leaves up to the block of its last product, without what is free; None with a loop within."""
    products = (
        "BB1:\n v_wmma_i32_16x16x16_iu8 v0\n s_add_u32 s0, s0\nBB2:\n v_wmma_f32_16x16x16_f16 v0\n ds_load_b32 v0"
    )
    assert isa.leaf_cycles(f"BB0:\n v_mov_b32 v0\n{products}\n v_mov_b32 v1\nBB3:\n v_mov_b32 v3\n {end}") == cycles


@pytest.mark.usefixtures("with_compiler")
def test_the_command(capsys):
    """It compiles the kernels of one shape, and fails where one is beyond a gate."""
    specs = variants.specs_for(AttnShape.parse(text := "20/1/576/512/latent"))
    assert cli.main(["compilers", "--shape", text]) == 0
    title, head, _, *rows, last = capsys.readouterr().out.splitlines()
    assert title.startswith("gfx1201 (Radeon AI PRO R9700")
    assert {"registers", "spills", "LDS", "VOPD"} <= set(head.split())
    assert len(rows) == len(specs)
    assert last == f"{len(rows)} variants: every gate holds"


def test_missing_driver(tmp_path):
    with pytest.raises(NoVulkanError) as caught:
        compiler.compile_variants([ATTEND], Compiler(mesa=tmp_path))
    assert str(caught.value) == (
        f"there is no radeon_icd*.json in {tmp_path}/usr/share/vulkan/icd.d: install mesa-vulkan-drivers, or take what "
        "scripts/lib/compilers.sh fetches (docs/compilers.md)"
    )
    with pytest.raises(ArgumentError, match="target: got 'gfx9', expected one of gfx1201, gfx1151, "):
        compiler.compile_variants([ATTEND], Compiler("gfx9"))


@pytest.mark.parametrize("name", TARGETS)
def test_the_compilers_of_other_mesas(name):
    """With what scripts/lib/compilers.sh brings: every target's driver offers its chip and tells all statistics."""
    mesa = Path(os.environ.get("ZINC_ATTN_CACHE", targets.PACKAGE_ROOT / ".cache")) / "compilers" / "mesa"
    if not mesa.is_dir():
        pytest.skip("scripts/lib/compilers.sh has not run")
    target = Compiler(name, mesa)
    specs = variants.specs_for(AttnShape(9, 3, 64), 0, ("f16",), compiler.layout_for(target))
    reports = compiler.compile_variants(specs, target)
    _, lines = gates.table(reports)
    assert list(gates.violations(reports)) == [] and len(lines) == len(specs) == 2
    driver = TARGETS[name].driver
    for program in (r.compiled for r in reports):
        assert 32 <= program.registers <= 800 and program.cycles > program.instructions > 500
        assert (program.waves is None) == (driver is targets.ANV) and program.mesa >= 26
