"""The console script's entry point. The package imports much; an interrupt meanwhile ends as any other does.

It lies beside the package because importing anything of the package imports all of it.
"""

from __future__ import annotations

import sys
from contextlib import suppress


def main() -> int:
    """Run ``zinc_attn.cli.main``. 130: interrupted, also while the package was imported."""
    try:
        from zinc_attn.cli.app import main as run

        return run()
    except KeyboardInterrupt:
        with suppress(AttributeError, OSError):  # a stderr that is closed or full
            sys.stderr.write("zinc-attn: interrupted\n")
            sys.stderr.flush()
        return 130


if __name__ == "__main__":
    sys.exit(main())
