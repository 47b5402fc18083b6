"""``zinc-attn check``: do the output bits stay the same, on this device and on others?

The base result of a case is that of the split rule on pages of 256 tokens. Every property but the last is a set of
variations that must give its bits, and it must have the digest that the NumPy oracle gave (``reference_record.json``)
or, for a case that the record lacks, the bits of the oracle computed here. By matrix units it must be within the bound
of their roundings from float64.
"""

from .cases import Case
from .outcome import Outcome
from .properties import check

__all__ = ["Case", "Outcome", "check"]
