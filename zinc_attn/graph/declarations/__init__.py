"""The contract of the graph's kernels and their callers: bindings, specialization constants and parameters.

Binding 0 of every kernel is its parameters, a record of at most PARAMS_WORDS words. Operands follow, then the result,
which may lie where an operand does unless a kernel says otherwise. GLSL, C and NumPy see the same record:
``params``, ``c`` and ``records`` make theirs of the fields here. A family of kernels has a file.
"""

from typing import Final

from .declare import PARAMS_WORDS, Field, GraphKernel
from .elementwise import *  # noqa: F403
from .moves import *  # noqa: F403
from .products import *  # noqa: F403
from .recurrent import *  # noqa: F403
from .routing import *  # noqa: F403
from .rows import *  # noqa: F403

GRAPH_KERNELS: Final = tuple(value for value in list(globals().values()) if isinstance(value, GraphKernel))

__all__ = ["GRAPH_KERNELS", "PARAMS_WORDS", "Field", "GraphKernel"]
