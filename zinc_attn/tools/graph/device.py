"""The operations of a forward pass by the graph's kernels, each of them read back."""

from collections.abc import Sequence
from contextlib import ExitStack, closing
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ...canonical.state import F32
from ...decode.one_shot import attention
from ...graph import blocks
from ...graph import declarations as graph
from ...graph.declarations import FLOAT_TYPES, GraphKernel
from ...graph.records import params, tensor
from ...graph.recurrent import scale_of
from ...graph.rope import Rope
from ...graph.units import tile_of_units
from ...kernels.device_info import DeviceInfo
from ...kernels.records import Words
from ...limits import WAVE
from ...runtime.device import SPIRV, Device, load_spirv
from ...runtime.protocol import Dispatch, Runtime, Use
from .hybrid import ROUTE_LEAST
from .model import Matrix

NO_EXPERTS: Final = {"x_slots": 0, "experts": 0, "ids": 0}  # parameters of a product of planes
NO_TURNS: Final = dict.fromkeys(("positions", "stride", "table", "pairs", "first", "step", "least"), 0)  # of a norm
POISON: Final = 0x7FC0DEAD  # the words of a result before the kernel
FEW: Final = 4  # rows of x that mul_mat_vec takes here, and mul_mat more
BOUND: Final = 1 << 27  # bytes of weights that a dispatch has, which any device binds
TILE: Final = (32, 32, 4, 4, 64)  # of mul_mat: rows, columns, those of an invocation, invocations


def as_words(x: NDArray[Any]) -> Words:
    """The bytes of an array as words, filled up with zeros."""
    raw = np.ascontiguousarray(x).reshape(-1).view(np.uint8)
    return np.concatenate([raw, np.zeros(-raw.size % 4, np.uint8)]).view(np.uint32)


def run(
    runtime: Runtime,
    kernel: GraphKernel,
    operands: Sequence[NDArray[Any]],
    results: Sequence[int | Words],
    spec: Sequence[int] = (),
    **values: Any,
) -> list[Words]:
    """Run a kernel, and return the words of each result.

    operands: the arrays of its read bindings, in order, without the parameters. values: the parameters; a tensor that
    is not among them is its binding's array. results: for each write binding, in order, words, or a number of POISON.
    """
    read = [binding.name for binding in kernel.decl.bindings[1:] if binding.access == "read"]
    bound = {name: tensor(np.ascontiguousarray(x)) for name, x in zip(read, operands, strict=True)}
    fields = (field.name for field in kernel.params if field.kind == "tensor")
    tensors = {name: bound[name] for name in fields if name in bound}
    record = params(kernel, **tensors | values)
    inputs, outputs = iter([record, *map(as_words, operands)]), iter(results)
    with ExitStack() as stack:
        buffers, written = [], []
        for binding in kernel.decl.bindings:
            words = next(inputs) if binding.access == "read" else next(outputs)
            words = np.full(words, POISON, np.uint32) if isinstance(words, int) else words
            use = Use.INPUT if binding.access == "read" else Use.OUTPUT
            buffer = stack.enter_context(closing(runtime.buffer(max(words.nbytes, 4), use)))
            runtime.write(buffer, words)
            buffers.append(buffer)
            written += [buffer] if binding.access == "write" else []
        program = runtime.kernel(kernel.decl, load_spirv(kernel.decl, runtime.info.kind), spec)
        step = Dispatch(program, tuple(buffers), kernel.groups(spec, record.tolist()))
        recording = stack.enter_context(closing(runtime.record([step])))
        runtime.run(recording)
        return [runtime.read(buffer).copy() for buffer in written]


def units_of(info: DeviceInfo, kind: str) -> tuple[int, ...] | None:
    """``tile_of_units`` of a device; None where it or the package has no units for the type of weights."""
    if info.matrix.int8 is None or not (SPIRV / graph.MUL_MAT_UNITS.decl.file).exists():
        return None
    on_cpu = info.kind == "cpu"
    return tile_of_units(kind, info.matrix.int8, info.subgroup_size if on_cpu else WAVE, on_cpu)


class OnDevice:
    """``Operations`` on a device."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def _float(self, kernel: GraphKernel, y: tuple[int, ...], operands: Sequence[Any], **values: Any) -> F32:
        """The first result, float32 of shape ``y``. values: the parameters, and ``spec``, the constants."""
        spec = values.pop("spec", ())
        y_tensor = tensor(np.empty(y, np.float32))
        others = sum(binding.access == "write" for binding in kernel.decl.bindings) - 1
        counts = int(np.prod(y)), *[1] * others
        words, *_ = run(self._device.runtime, kernel, operands, counts, spec, y=y_tensor, **values)
        return words.view(np.float32).reshape(y)

    def embed(self, weights: Matrix, tokens: NDArray[np.int32]) -> F32:
        shape = len(tokens), weights.columns
        if weights.kind in FLOAT_TYPES:
            stored = weights.rows.view(np.float32 if weights.kind == "f32" else np.uint16)
            kinds = graph.MOVE_TYPES.index(weights.kind), graph.MOVE_TYPES.index("f32")
            move = graph.MOVE_OPS.index("get_rows"), *kinds
            return self._float(graph.MOVE, shape, (stored, tokens), spec=move, id_words=1, shift=(0, 0, 0, 0))
        packed = blocks.pack(weights.kind, weights.rows)
        kind = (graph.WEIGHT_TYPES.index(weights.kind),)
        values = {"offset": 0, "steps": (0, 0), "rows": len(weights.rows), "first": 0}
        return self._float(graph.GET_WEIGHTS, shape, (packed, tokens), spec=kind, **values)

    def norm(self, x: F32, weight: F32 | None, eps: float, op: str = "rms") -> F32:
        factor = x if weight is None else weight[None]
        values = {"eps": eps, "factor": 1.0 / x.shape[-1], "scales": (0.0, 0.0), "joined": 1}
        spec = graph.NORM_OPS.index(op), int(weight is not None), 0, 0
        return self._float(graph.NORM, x.shape, (x, *[factor] * 4), spec=spec, **values | NO_TURNS)

    def product(self, weights: Matrix, x: F32, added: F32 | None = None, ids: NDArray[np.int32] | None = None) -> F32:
        """With the same bits: few rows of x go to vec kernels, others to tiles, or without addend to matrix units."""
        rows, runtime = len(weights.rows) // weights.experts, self._device.runtime
        is_float, float_sizes = weights.kind in FLOAT_TYPES, graph.FLOAT_VEC.values(x.shape[-1])
        few = len(x) <= FEW and bool(float_sizes["SERVED"] or not is_float)
        y = np.empty((*(x.shape[:1] if ids is None else ids.shape), rows), np.float32)
        plus: NDArray[Any] = y if added is None else added
        values: dict[str, Any] = {"y": tensor(y), **NO_EXPERTS}
        waves, subgroups, add = len(x) % 4 + 1, self._device.info.wave_subgroups, int(added is not None)
        units = None if few or add or is_float else units_of(self._device.info, weights.kind)
        columns, chosen = len(x), plus
        if ids is not None:
            x = x.reshape(len(x), -1, x.shape[-1])
            values |= {"x_slots": x.shape[1], "experts": (0, *[weights.experts] * 2), "ids": tensor(ids)}
            columns, chosen = 1, ids if few else self._by_expert(ids, weights.experts, (units or TILE)[1])
        spec: tuple[int, ...] = (*(units or TILE), add, int(ids is not None))
        if few:  # any number of waves has the same bits
            ahead = len(x) % 2 and int(float_sizes["AHEAD"] or not is_float)
            spec = columns, 32 * waves, int(subgroups), 4, ahead, add, int(ids is not None), 0
        if is_float:
            stored = weights.rows.view(np.float32 if weights.kind == "f32" else np.uint16)
            types = FLOAT_TYPES.index(weights.kind), FLOAT_TYPES.index("f32")
            stored = stored.reshape(weights.experts, rows, -1)
            kernel = graph.MUL_MAT_FLOAT_VEC if few else graph.MUL_MAT_FLOAT
            (words,) = run(runtime, kernel, (stored, x, plus, chosen), (y.size,), (*types, *spec), **values)
            return words.view(np.float32).reshape(y.shape)
        count = 8 * -(-x.shape[-1] // 256) * (x.size // x.shape[-1])
        quantized = run(runtime, graph.QUANTIZE, (x,), (8 * count, 2 * count))
        steps = weights.rows.size // weights.experts // 16, 0
        values |= {"w_begin": 0, "w_steps": steps, "repeats": (1, 1), "blocks": x.shape[-1] // 32}
        kernel = graph.MUL_MAT_VEC if few else graph.MUL_MAT_UNITS if units else graph.MUL_MAT
        kind = graph.WEIGHT_TYPES.index(weights.kind)
        result: int | Words = y.size
        size, most = weights.rows.size // weights.experts, max(1, BOUND * weights.experts // weights.rows.size)
        for first in range(0, weights.experts, most):
            bound = weights.rows[first * rows : (first + most) * rows]
            values |= {"experts": (first, bound.size // size, weights.experts)}
            packed = [blocks.pack(weights.kind, matrix) for matrix in bound.reshape(-1, rows, bound.shape[-1])]
            operands: tuple[NDArray[Any], ...] = np.concatenate(packed), *quantized, plus, chosen
            (result,) = run(runtime, kernel, operands, (result,), (kind, *spec), **values)
        return np.asarray(result).view(np.float32).reshape(y.shape)

    def _by_expert(self, ids: NDArray[np.int32], experts: int, columns: int) -> Words:
        """The list of a product's columns, in tiles of so many."""
        tiles = min(ids.size, ids.size // columns + experts + 1)
        values: dict[str, Any] = {"experts": experts, "columns": columns, "tiles": tiles}
        return run(self._device.runtime, graph.BY_EXPERT, (ids,), (tiles * (columns + 1),), **values)[0]

    def rope(self, x: F32, positions: NDArray[np.int32], way: Rope) -> F32:
        values = {"stride": len(x), "pairs": way.pairs, "step": way.step, "least": 0.0}
        values |= dict.fromkeys(("positions", "table", "first"), 0)
        spec, operands = (FLOAT_TYPES.index("f32"),), (x, np.tile(positions, 4), way.table())
        return self._float(graph.ROPE, x.shape, operands, spec=spec, **values)

    def attend(self, q: F32, k: NDArray[Any], v: NDArray[Any]) -> F32:
        return np.asarray(attention(q, k, v, device=self._device))

    def swiglu(self, gate: F32, up: F32) -> F32:
        spec = graph.GLU_OPS.index("swiglu"), FLOAT_TYPES.index("f32")
        return self._float(graph.GLU, gate.shape, (gate, up), spec=spec, alpha=0.0, limit=0.0)

    def unary(self, op: str, x: F32) -> F32:
        spec = graph.UNARY_OPS.index(op), *[FLOAT_TYPES.index("f32")] * 2, graph.FOLLOW_OPS.index("none")
        return self._float(graph.UNARY, x.shape, (x, x), spec=spec, **dict.fromkeys("abcd", 0.0))

    def route(self, scores: F32, k: int) -> F32:
        spec = graph.GATE_OPS.index("soft_max"), 0, graph.ROUTE_NORM_OPS.index("sum"), 0
        y = np.empty((len(scores), k), np.float32)
        values: dict[str, Any] = {"ids": tensor(y), "y": tensor(y), "factor": 0.0, "added": 0.0}
        values |= {"least": ROUTE_LEAST, "most": np.inf}
        both = run(self._device.runtime, graph.ROUTE, (scores, scores), (y.size, y.size), spec, **values)
        return np.concatenate([words.reshape(y.shape) for words in both], -1).view(np.float32)

    def sum_experts(self, x: F32, weights: F32) -> F32:
        return self._float(graph.SUM_EXPERTS, (len(x), x.shape[-1]), (x, weights, x, x), spec=(0,), added=(0, 0))

    def binary(self, op: str, a: F32, b: F32) -> F32:
        kinds = graph.BINARY_OPS.index(op), *[FLOAT_TYPES.index("f32")] * 3
        return self._float(graph.BINARY, a.shape, (a, b), spec=kinds)

    def convolve(self, x: F32, w: F32, bias: F32) -> F32:
        tokens, length = x.shape[1] - w.shape[1] + 1, 1 + len(w) % 2  # of an invocation's run: the same bits
        values: dict[str, Any] = dict.fromkeys(("begins", "ends", "offsets", "scales"), (0, 0))
        values |= {"run": length, "size": 1, "eps": 0.0, "factor": 0.0}
        return self._float(graph.SSM_CONV, (tokens, len(w)), (x, x, w, bias), spec=(1, 1, 0, 0), **values)

    def _states(
        self, kernel: GraphKernel, sizes: tuple[int, int], operands: Sequence[Any], spec: Any, **values: Any
    ) -> F32:
        """Outputs and the state after the last token, of these sizes. operands: without the ids, which come last."""
        operands, values = (*operands, np.zeros(1, np.int32)), values | dict.fromkeys(("ids", "outputs", "kept"), 0)
        words = run(self._device.runtime, kernel, operands, sizes, spec, steps=(sizes[1], sizes[1]), slots=1, **values)
        return np.concatenate(words).view(np.float32)

    def delta_net(self, q: F32, k: F32, v: F32, gate: F32, beta: F32, state: F32) -> F32:
        size, rows_each = state.shape[-1], 1 + len(v) % 2  # own, rows of a lane: the bits are the same
        operands, spec = (q, k, v, gate, beta, state), (size, rows_each, int(gate.shape[-1] > 1), rows_each % 2)
        return self._states(graph.DELTA_NET, (v.size, state.size), operands, spec, scale=scale_of(size))

    def scan(self, state: F32, x: F32, dt: F32, a: F32, b: F32, c: F32) -> F32:
        spec = state.shape[-1], 1 + len(x) % 2, int(a.shape[1] > 1)
        return self._states(graph.SSM_SCAN, (x.size, state.size), (state, x, dt, a, b, c), spec, a=0)
