"""gfx1201 without the card: RADV's machine code for the chip, executed by an interpreter of AMD's instruction set.

zinc_attn.tools.compilers compiles, decode.py reads the code, wave.c executes what operations.def defines, judge.py
holds that against AMD's pseudo-code, and runtime.py makes a device of it, on which scripts/gfx1201 runs ``check``.
"""

CASES = (  # they reach every kernel, every storage type and every option
    "9/3/64 f32 65",
    "9/3/64 bf16 130 softcap=20+scale=0.25+sinks",
    "9/3/64 f16 600 rows=3 rising window=300+sinks",
    "9/3/64 f16 130 jumping alibi+mask=tree",
    "2/1/72/40/latent f16 130 rising",
    "9/3/64 q5_1/q4_0 130 rising",
    "9/3/64 q4_1/q5_0 70 falling",
    "6/2/72/40 iq4_nl/fp8_e4m3 130",
    "9/3/64 q8_0 600 fused cancelling mask=f32+noncausal",
)
