"""The proof kit: everything that a report from somebody's card needs, by one command, in one folder.

A proof runs ``check``, ``sweep`` and ``bench`` in processes of their own, several times over, reads temperature and
clocks around each, puts the model's times beside the measured ones, and leaves report.md and report.json. It verifies,
times and records nothing itself: it reads what the commands print. The report names no person and no machine.
"""

from .kit import check_folder, prove
from .markdown import markdown
from .privacy import Scrubber
from .report import Setting, make_report
from .sensors import Sensors
from .spec import RESTARTS, SHAPES, TIMEOUT_S, ProofSpec, Step
from .steps import StepResult

__all__ = [
    "RESTARTS",
    "SHAPES",
    "TIMEOUT_S",
    "ProofSpec",
    "Scrubber",
    "Sensors",
    "Setting",
    "Step",
    "StepResult",
    "check_folder",
    "make_report",
    "markdown",
    "prove",
]
