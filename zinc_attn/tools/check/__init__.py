"""``zinc-attn check``: do the output bits stay the same, on this device and on others?

A case is a shape, a dtype of K and V, a context and masking options: one decode row over seeded values that are the
same on every machine. Its base result is that of the split rule on pages of 256 tokens. Every property but the last is
a set of variations that must give the bits of the base result. The base result itself must have the digest that the
NumPy oracle gave (``reference_record.json``), or, for a case that the record does not have, the bits of the oracle
computed here.

With matrix units a case has several rows, and its base result must be within the bound of their roundings from float64;
its digest is the device's and driver's own.
"""

from .cases import Case
from .outcome import Outcome
from .properties import check

__all__ = ["Case", "Outcome", "check"]
