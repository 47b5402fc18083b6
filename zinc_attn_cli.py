"""The console script's entry point, beside the package, whose import takes long and can be interrupted."""

from __future__ import annotations

import sys
from contextlib import suppress


def main() -> int:
    """Run ``zinc_attn.cli.main``. 130: interrupted, also during the package's import."""
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
