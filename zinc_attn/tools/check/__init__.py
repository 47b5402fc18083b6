"""``zinc-attn check``: do the output bits stay the same, on this device and on others?

The base result of a case comes from the split rule on pages of 256 tokens. Every property but the last is a set of
variations that must give the bits of the base result. The base result must have the digest that the NumPy oracle gave
(``reference_record.json``) or, for a case that the record lacks, the bits of the oracle computed here. With matrix
units it must be within the bound of their roundings from float64.
"""

from .cases import Case
from .outcome import Outcome
from .properties import check

__all__ = ["Case", "Outcome", "check"]
