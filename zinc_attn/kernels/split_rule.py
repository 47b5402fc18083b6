"""The rules by which work is laid out, none of which changes a bit: splits, and rows that share keys."""

from typing import Final

from .formulas import Formulas

WORKGROUPS_PER_UNIT: Final = 64
# The rule. NODES: that some row sees; COMPUTE_UNITS: of the device; Q_LEN: query rows of the sequence in the call.
# Split i of them begins at node FIRST_NODE + i * NODES // SPLITS.
SPLIT_RULE: Final = Formulas(
    {
        "SHARES": ("KV_HEADS * HEAD_CHUNKS * Q_LEN", "workgroups that a split has"),
        "MOST_SPLITS": (
            "(WORKGROUPS_PER_UNIT * COMPUTE_UNITS + SHARES - 1) // SHARES",
            "splits from which every compute unit has WORKGROUPS_PER_UNIT workgroups",
        ),
        "SPLITS": (
            "1 if NODES == 0 else NODES if NODES <= MOST_SPLITS else MOST_SPLITS",
            "a node each, until the device is full",
        ),
    },
    ("NODES", "COMPUTE_UNITS", "KV_HEADS", "HEAD_CHUNKS", "Q_LEN"),
    {"WORKGROUPS_PER_UNIT": WORKGROUPS_PER_UNIT},
)
# Whether query rows attend together the keys that they share. ROWS: of a sequence at most; ITEMS: workgroups of a KV
# head that attend the shared keys; SAVED: nodes of a KV head that need not be read again.
SHARED_FILLS: Final = 3  # saved nodes must fill the device so many times
SEQUENCE_ROWS: Final = 8  # query rows of a sequence from which conversions of K and V are worth a dispatch
SEQUENCE_PER_UNIT: Final = 8  # workgroups for shared keys that a compute unit needs ...
FUSED_PER_UNIT: Final = 3  # ... and with arithmetic "fused", of which conversions are a larger part
SHARING_RULE: Final = Formulas(
    {
        "NEEDED": ("FUSED_PER_UNIT if FUSED == 1 else SEQUENCE_PER_UNIT", "workgroups that a compute unit needs"),
        "FILLS": (
            "ITEMS * KV_HEADS >= COMPUTE_UNITS and SAVED // SHARED_FILLS * KV_HEADS >= COMPUTE_UNITS",
            "whether it pays for rows of several sequences",
        ),
        "PAYS": (
            "FILLS == 1 and ROWS >= SEQUENCE_ROWS and ITEMS * KV_HEADS >= NEEDED * COMPUTE_UNITS",
            "whether it pays for rows of one, which side by side in the grid find the keys in caches anyway: sharing "
            "then saves conversions alone, at the price of fewer and longer workgroups (docs/cost-model.md)",
        ),
    },
    ("ROWS", "ITEMS", "SAVED", "FUSED", "KV_HEADS", "COMPUTE_UNITS"),
    {
        "SHARED_FILLS": SHARED_FILLS,
        "SEQUENCE_ROWS": SEQUENCE_ROWS,
        "SEQUENCE_PER_UNIT": SEQUENCE_PER_UNIT,
        "FUSED_PER_UNIT": FUSED_PER_UNIT,
    },
)
