"""``python -m zinc_attn.cli``: the command line, for programs that start it with an interpreter of their own."""

import sys

from .app import main

sys.exit(main())
