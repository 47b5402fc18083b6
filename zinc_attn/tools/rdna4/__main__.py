"""``python -m zinc_attn.tools.rdna4``."""

import sys

from .command import main

sys.exit(main())
