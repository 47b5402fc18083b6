"""The files of tests with torch and transformers, which one process of a parallel run has: their import takes seconds.

``test_model_files.py`` starts it. A run in a single process, or one that names a file, has the files itself.
"""

from pathlib import Path

import pytest

TESTS = Path(__file__).parent
FILES = [
    *(TESTS / f"device/test_{name}.py" for name in ("dense_masks", "transformers")),
    *(TESTS / f"device/test_transformers_{name}.py" for name in ("failures", "rows", "torch")),
    TESTS / "host/test_model_types.py",
]


def leave_to_their_process(path: Path, config: pytest.Config) -> bool:
    """A process that runs a part of the tests, or none, does not read these files unless one of them is named."""
    is_part = hasattr(config, "workerinput") or config.option.collectonly
    return is_part and path in FILES and not any(path.name in argument for argument in config.args)
