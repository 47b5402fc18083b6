"""The compilers behind a prediction: who made the SPIR-V of this package, and whose instructions the model counts."""

from __future__ import annotations

from functools import lru_cache

from ...errors import KernelError
from ...runtime.device import build_record


@lru_cache(maxsize=1)
def prediction_compilers() -> dict[str, str | None]:
    """What a stored prediction says of compilers.

    glsl: the GLSL compiler of the SPIR-V build record, None in a clone that was not built. counted_glsl and
    counted_mesa: the compilers whose instruction counts the model uses. Where glsl is another version than
    counted_glsl, the counts may be those of another program.

    The tables ISSUE, STORAGE_ISSUE and MERGE_ISSUE and the register counts are those of ACO, the shader compiler of
    RADV, as Mesa 25.0.7 compiles the modules of glslang 12 for gfx1201 without the card (``zinc-attn rdna4``). Debian
    12 has glslang 12, and its backports Mesa 25.0.7. tests/host/test_cost.py compares the tables with that compiler's
    output.
    """
    try:
        glsl = str(build_record()["compiler"])
    except KernelError:
        glsl = None
    return {"glsl": glsl, "counted_glsl": "glslang 12", "counted_mesa": "Mesa 25.0.7, ACO for gfx1201"}
