"""Print the record of the oracle's digests as zinc_attn/tools/reference_record.json has it."""

from zinc_attn.planning.arithmetic import EXACT
from zinc_attn.tools.check import Case
from zinc_attn.tools.check.outcome import make_record

sets = {}
for arithmetic in EXACT:
    of = "" if arithmetic == "canonical" else f" {arithmetic}"
    sets |= {f"quick{of}": Case.quick(arithmetic), f"default{of}": Case.default(arithmetic)}
print(make_record(sets), end="")
