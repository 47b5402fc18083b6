"""Graphs of ggml's operations for test_ggml.py: their texts, their memory, and NumPy's bits of them.

A text has a node after the other, ``OP(operands)[ne:nb@bytes]``. An operand is a node's number, a capital for a tensor
that the test gives, or a letter with sizes for a leaf. ne: where it is not the first operand's; nb, from the second
dimension on, and bytes: of a view. After it, !: the result lies where the first operand does; ^: it is an output;
=2+64: it lies 64 bytes behind the begin of node 2, which no later node reads.
"""

import re
import struct
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from c_host import NATIVE, ROOT

import zinc_attn as za
from zinc_attn.graph import elementwise, moves, order, products, recurrent, rows
from zinc_attn.graph.declarations.elementwise import BINARY_OPS, UNARY_OPS
from zinc_attn.graph.rope import Rope, rope

# --- operations ------------------------------------------------------------------------------------------------------

NUMBERS = re.findall(r"\bGGML_OP_(\w+)", (ROOT / "tests/ggml/ggml.h").read_text().split("GGML_OP_COUNT")[0])
OF_UNARY = {"xielu": (0.5, 0.75, 1.5, -0.25), "scale": (3.0, 0.0), "clamp": (0.25, 1.5)}
OF_UNARY |= {"leaky_relu": (0.125,), "fill": (0.75,)}


class Op(NamedTuple):
    name: str  # ggml's
    compute: Callable[..., Any] | None  # of the operands, whose last dimension is ggml's first; None: a view
    params: bytes


def op(name: str, compute: Callable[..., Any] | None = None, *params: float) -> Op:
    return Op(name, compute, b"".join(struct.pack("i" if isinstance(x, int) else "f", x) for x in params))


def unary(name: str, x: Any) -> Any:
    return elementwise.unary(name, x, *OF_UNARY.get(name, ()))


def turned(mode: Any = "normal", number: int = 0, name: str = "ROPE", **numbers: Any) -> Op:
    r = Rope(32, mode, sections=(8, 4, 4, 0), backward=name == "ROPE_BACK", **numbers)
    scales = r.freq_base, r.freq_scale, r.ext_factor, r.attn_factor, r.beta_fast, r.beta_slow
    compute = lambda x, p: rope(x, p.reshape(4, -1), r.table(), r.step)  # noqa: E731
    return op(name, compute, 0, 32, number, 0, r.n_ctx_orig, *scales, *r.sections)


def multiply(w: Any, x: Any) -> Any:
    x = x.reshape(-1, x.shape[-1])
    return products.multiply_floats(w, x) if isinstance(w, np.ndarray) else products.multiply(w, x)


def experts(w: Any, x: Any, ids: Any) -> Any:
    multiply: Any = products.multiply if isinstance(w, list) else products.multiply_floats
    rows = len(w[0].q if isinstance(w, list) else w[0])
    return products.of_experts(lambda e, x: multiply(w[e], x), len(w), x[0], ids[0, 0], rows)


def attend(q: Any, k: Any, v: Any) -> Any:
    return za.reference.emulate(q[0].swapaxes(0, 1), k, v, causal=False, scale=0.125)[0]


def states(scanned: Any) -> Any:
    return np.concatenate([part.ravel() for part in scanned])


OPS = {name: op(name) for name in ("VIEW", "RESHAPE", "PERMUTE")} | {
    **{x.upper(): op("UNARY", partial(unary, x), i, *OF_UNARY.get(x, ())) for i, x in enumerate(UNARY_OPS[:22])},
    **{x.upper(): op(x.upper(), partial(unary, x), *OF_UNARY.get(x, ())) for x in UNARY_OPS[22:]},
    **{x.upper(): op(x.upper(), partial(elementwise.binary, x)) for x in BINARY_OPS},
    "SCALE_ADD": op("SCALE", lambda x: elementwise.unary("scale", x, 3, 1), 3.0, 1.0),
    "GLU": op("GLU", partial(elementwise.glu, "swiglu"), 2),
    "HALVES": op("GLU", lambda x: elementwise.glu("geglu", *np.split(x, 2, -1)[::-1]), 1, 1),
    "ADD_ID": op("ADD_ID", lambda a, b, ids: elementwise.add_id(a[0], b[0, 0], ids[0, 0])),
    **{f"{x}_NORM": op(f"{x}_NORM", partial(rows.norm, x.lower(), eps=1e-5), 1e-5) for x in ("RMS", "L2")},
    "NORM": op("NORM", partial(rows.norm, "norm", eps=1e-5), 1e-5),
    "GROUP_NORM": op("GROUP_NORM", lambda x: rows.norm("norm", x.reshape(2 * len(x), -1), 1e-5), 2, 1e-5),
    "SUM_ROWS": op("SUM_ROWS", rows.sum_rows),
    "MEAN": op("MEAN", lambda x: rows.sum_rows(x, 1 / x.shape[-1])),
    "SUM": op("SUM", lambda x: rows.sum_rows(x.reshape(-1))),
    "SOFT_MAX": op("SOFT_MAX", lambda x: rows.soft_max(x, 1), 1.0),
    "ALIBI": op("SOFT_MAX", lambda x, m: rows.soft_max(x, 0.5, m, **rows.slopes(8, x.shape[1])), 0.5, 8.0),
    "ROPE": turned(freq_base=500.0),
    "YARN": turned("neox", 2, freq_scale=0.25, ext_factor=0.5, attn_factor=1.25, n_ctx_orig=512),
    **{f"{x.upper()}_ROPE": turned(x, i) for x, i in (("mrope", 8), ("vision", 24), ("imrope", 40))},
    "ROPE_BACK": turned(name="ROPE_BACK", freq_base=500.0),
    "ARGSORT": op("ARGSORT", partial(order.argsort, descending=True), 1),
    "ASCENDING": op("ARGSORT", partial(order.argsort, descending=False)),
    **{f"TOP_{k}": op("TOP_K", partial(order.top_k, k=k)) for k in (5, 1500)},
    "MUL_MAT": op("MUL_MAT", multiply),
    "MUL_MAT_ID": op("MUL_MAT_ID", experts),
    "FLASH_ATTN_EXT": op("FLASH_ATTN_EXT", attend, 0.125),
    "GET_ROWS": op("GET_ROWS", lambda x, ids: moves.get_rows(x, ids.reshape(*x.shape[:2], -1))),
    "CPY": op("CPY", lambda x, _: x),
    "CONCAT": op("CONCAT", lambda *x: np.concatenate(x, -1)),
    "SSM_CONV": op("SSM_CONV", lambda x, w: recurrent.ssm_conv(x[0], w[0, 0])),
    "GATED_DELTA_NET": op("GATED_DELTA_NET", lambda *arguments: states(recurrent.delta_net(*arguments)), 1),
    "TWO_STATES": op("GATED_DELTA_NET", lambda *arguments: states(recurrent.delta_net(*arguments, slots=2)), 2),
    "SSM_SCAN": op(
        "SSM_SCAN", lambda s, x, t, a, b, c, i: states(recurrent.ssm_scan(s, x, t[0], a[0, 0], b, c, i.ravel())), 1
    ),
}  # fmt: skip
VIEWS = [name for name in OPS if OPS[name].compute is None]
PLAIN = {*map(str.upper, UNARY_OPS + BINARY_OPS), "RMS_NORM", "NORM", "L2_NORM", "SOFT_MAX"}  # in any place

# --- graphs ----------------------------------------------------------------------------------------------------------


class Node(NamedTuple):
    op: str  # "": a leaf
    sources: tuple[Any, ...]  # numbers of nodes, and capitals
    ne: tuple[int, ...]
    nb: tuple[int, ...] = ()
    offset: int = 0
    in_place: bool = False
    output: bool = False
    place: tuple[int, int] | None = None  # of another node, and bytes behind its begin

    @property
    def steps(self) -> tuple[int, ...]:
        steps = [4, *(self.nb or (4 * self.ne[0],))]
        while len(steps) < 4:
            steps.append(steps[-1] * self.ne[len(steps) - 1])
        return tuple(steps)


NODE = re.compile(r"(\w+)\(([^)]*)\)(?:\[([\d,]+)(?::([\d,]+))?(?:@(\d+))?\])?([!^]*)(?:=(\w+)\+(\d+))?")


def read(text: str, nodes: list[Node], leaf: Callable[[tuple[int, ...]], int]) -> None:
    """The text's nodes are added to nodes."""
    names: dict[str, int] = {}
    for i, (name, operands, ne, nb, offset, flags, other, behind) in enumerate(NODE.findall(text)):
        result = re.findall(r"(\w+)(?:\[([\d,]+)\])?", operands)
        for letter, sizes in result:
            if letter.islower() and letter not in names:
                names[letter] = leaf((*map(int, sizes.split(",")), 1, 1, 1)[:4])
        sources = tuple(names.get(operand, operand) for operand, _ in result)
        shape = nodes[sources[name.startswith("MUL_MAT")]].ne if not ne else (*map(int, ne.split(",")), 1, 1, 1)[:4]
        steps = tuple(map(int, nb.split(","))) if nb else ()
        names[str(i)] = len(nodes)
        place = (names[other], int(behind)) if other else None
        nodes.append(Node(name, sources, shape, steps, int(offset or 0), "!" in flags, "^" in flags, place))


class Graph:
    """A result may get the memory of a value that no later node reads, as ggml's has; without rng it has its own."""

    def __init__(self, nodes: list[Node], rng: Any) -> None:
        self.nodes, self.root, self.begin, self.integers = nodes, list[int](), list[int](), set[int]()
        for i, node in enumerate(nodes):
            source = node.sources[node.op == "CPY"] if node.in_place or node.op in (*VIEWS, "CPY") else None
            self.root.append(i if source is None else self.root[source])
            self.begin.append(node.offset + (0 if source is None else self.begin[source]))
            if node.op and (self.root[i] in self.integers or OPS[node.op].name in ("ARGSORT", "TOP_K")):
                self.integers.add(i)
        leaves = [i for i, node in enumerate(nodes) if not node.op]
        operands = [[j for j in node.sources if not isinstance(j, str)] for node in nodes]
        last = {self.root[j]: i for i in range(len(nodes)) for j in operands[i]}
        ends = [i for i, node in enumerate(nodes) if node.output or self.root[i] not in last]
        self.kept = [*leaves, *ends]  # what is not written again
        last |= {self.root[i]: len(nodes) for i in self.kept}
        self.bytes = max(4 * int(np.prod(node.ne)) for node in nodes) + 4095 & ~4095  # of a slot
        self.slot = {i: n for n, i in enumerate(leaves)}
        for i, node in enumerate(nodes):
            if self.root[i] != i or not node.op:
                continue
            alike = {j for j in operands[i] if node.op in PLAIN and self.root[j] == j and nodes[j].ne == node.ne}
            alike -= {self.root[j] for j in operands[i] if j not in alike}
            taken = {self.slot[j] for j in self.slot if last[j] > i or (last[j] == i and j not in alike)}
            free = [slot for slot in range(len(taken) + 6) if slot not in taken]
            self.slot[i] = int(rng.choice(free)) if rng else max(self.slot.values()) + 1
        self.words = (max(self.slot.values()) + 1) * self.bytes // 4
        self.offsets = {i: slot * self.bytes for i, slot in self.slot.items()}
        self.offsets |= {i: self.offsets[node.place[0]] + node.place[1] for i, node in enumerate(nodes) if node.place}

    def value(self, i: int, words: Any) -> Any:
        node, kind = self.nodes[i], np.int32 if i in self.integers else np.float32
        offset = self.offsets[self.root[i]] + self.begin[i]
        return np.ndarray(node.ne[::-1], kind, words, offset, node.steps[::-1])

    def ends(self, words: Any) -> dict[int, Any]:
        """The bits of what is kept; every NaN as the same."""
        values = {i: self.value(i, words).copy() for i in self.kept}
        return {i: np.where(np.isnan(x), np.uint32(0x7FC00000), x.view(np.uint32)) for i, x in values.items()}

    def oracle(self, words: Any, arrays: dict[str, Any]) -> dict[int, Any]:
        words = words.copy()
        values = [self.value(i, words) for i in range(len(self.nodes))]
        for i, node in enumerate(self.nodes):
            compute = OPS[node.op].compute if node.op else None
            if compute:
                result = compute(*(arrays[j][1] if isinstance(j, str) else values[j] for j in node.sources))
                values[i][...] = result.reshape(values[i].shape)
        return self.ends(words)

    def run(self, back_end: Any, words: Any, arrays: dict[str, Any]) -> dict[int, Any]:
        (buffer, whole), tensors = back_end.memory(words), list[Any]()
        for i, node in enumerate(self.nodes):
            if self.root[i] == i:
                kind = "i32" if i in self.integers else "f32"
                tensors.append(back_end.tensor(kind, *node.ne, buffer=buffer, offset=self.offsets[i]))
            else:
                tensors.append(back_end.view(tensors[node.sources[node.op == "CPY"]], node.ne, node.steps, node.offset))
            if node.op:
                (name, _, params), output = OPS[node.op], 2 * node.output
                sources = [arrays[j][0] if j in arrays else tensors[j] for j in node.sources]
                assert back_end.describe(NUMBERS.index(name), tensors[i], *sources, params=params, flags=output)
        back_end.graph([tensor for tensor, node in zip(tensors, self.nodes, strict=True) if node.op])
        return self.ends(back_end.get(whole, np.empty_like(words)))

    def wrong(self, back_end: Any, words: Any, arrays: dict[str, Any], want: dict[int, Any]) -> list[int]:
        """Of a run, the values that have other bits."""
        result = self.run(back_end, words, arrays)
        return [i for i in self.kept if not np.array_equal(result[i], want[i])]


def named(text: str, rng: Any = None) -> Graph:
    nodes: list[Node] = []

    def leaf(ne: tuple[int, ...]) -> int:
        nodes.append(Node("", (), ne))
        return len(nodes) - 1

    read(text, nodes, leaf)
    return Graph(nodes, rng)


# --- texts -----------------------------------------------------------------------------------------------------------

FUSIONS = {  # of native/ggml: nodes, who else reads what is in between, and the dispatches that it saves
    name: ("".join(re.findall(r'"([^"]*)"', nodes)), others, int(saves))
    for name, nodes, others, saves in re.findall(
        r'{"(\w+)", ((?:"[^"]*"\s*)+),\s*"([^"]*)", (\d)}', (NATIVE / "ggml/fusions.cpp").read_text()
    )
}
NET = "q=8,2,3 k=8,1,3 v=8,2,3 g=1,2,3 b=1,2,3"
SIZES = {  # of the leaves of each, and of nodes
    "addend": "x=256,3 a=256",
    "gated": "x=256,3",
    "rms": "x=256 a=256 2=64",
    "follower": "x=256,3 a=256 b=256,3",
    "turned": "x=64,4,3 a=64",
    "int8": "x=256,3",
    "router": "l=16,3 b=16 3=4,3:64 4=1,16,3 5=1,4,3 6=4,3 7=1,3",
    "experts": "x=128,2,3 w=1,2,3 a=128,3 b=128,3 1=128,3:1024 2=128,3:1024@512",
    "summed": "x=256,2,2 w=1,2,2 a=256 1=256,2:2048 2=256,2:2048@1024",
    "concat": "s=2,256 x=1,256 w=3,256 0=3,256 1=256",
    "activated": "x=3,256 w=3,256 b=256 0=256",
    "normed": "x=3,256 w=3,256 0=256 1=64,2:256 4=64,2:256@512",
    "states": f"{NET} s=8,8,2 c=128 0=16,11 1=128@192",
    "gathered": f"{NET} s=128,6 0=128 1=8,8,2 2=16,11",
    "settled": "x=64,4,3 1=64,3,4:1024,256 2=64,4,3",
}


def sized(name: str) -> str:
    """The text of a fusion's nodes, all that may be missing among them, the first where there are several."""
    sizes = dict(entry.split("=") for entry in SIZES[name].split())
    text = re.sub(r"\b[a-z]\b", lambda m: f"{m[0]}[{sizes[m[0]]}]", re.sub(r"/\w+|\?", "", FUSIONS[name][0]))
    nodes = enumerate(re.findall(r"\w+\([^)]*\)", text))
    return " ".join(node + (f"[{sizes[str(i)]}]" if str(i) in sizes else "") for i, node in nodes)


FUSED = {name: sized(name).replace("W", "G") if name == "rms" else sized(name) for name in SIZES}  # G: float weights
ROUTER = FUSED["router"].replace("SOFT_MAX", "SIGMOID").partition(" SUM_ROWS")[0] + " SCALE_ADD(6)"
GRAPHS = FUSED | {
    **{f"{x} in place": f"SCALE(x[256,3]) {x}(0)! MUL(1, a[256,3]) ADD(2, 0)" for x in ("RMS_NORM", "L2_NORM", "SILU")},
    "a reshaped result is an output": "RMS_NORM(x[256,3]) RESHAPE(0)^ MUL(1, a[256,3])",
    "a sum in place of the product's operand": "SCALE(x[256,3]) MUL_MAT(W, 0) ADD(0, 1)! MUL_MAT(W, 2)",
    "a dense layer": "RMS_NORM(x[256,3]) MUL(0, a[256]) MUL_MAT(W, 1) RESHAPE(2)[64,4,3] ROPE(3, P) "
    "PERMUTE(4)[64,3,4:1024,256] FLASH_ATTN_EXT(5, K, V)[64,4,3] RESHAPE(6)[256,3] MUL_MAT(W, 7) ADD(8, x) RMS_NORM(9) "
    "MUL(10, b[256]) MUL_MAT(W, 11) MUL_MAT(W, 11) GLU(12, 13) MUL_MAT(W, 14) ADD(15, 9)",
    "experts with a router": "RMS_NORM(x[256,3]) MUL_MAT(W, 0) VIEW(1)[4,3:16] SOFT_MAX(2) ARGSORT(3) VIEW(4)[2,3:16] "
    "RESHAPE(3)[1,4,3] GET_ROWS(6, 5)[1,2,3] RESHAPE(0)[256,1,3] MUL_MAT_ID(E, 8, 5)[64,2,3] MUL(9, 7) "
    "VIEW(10)[64,3:512] VIEW(10)[64,3:512@256] ADD(11, 12) ADD(13, a[64,3]) RMS_NORM(14) MUL(15, b[64])",
    "a delta net": "CONCAT(s[3,256], x[1,256])[4,256] SSM_CONV(0, w[4,256])[256] SILU(1) VIEW(2)[64,1:256] L2_NORM(3) "
    "VIEW(2)[64,1:256@256] L2_NORM(5) VIEW(2)[64,2:256@512] GET_ROWS(t[8192,2], I)[8192] RESHAPE(8)[64,64,2] "
    "GATED_DELTA_NET(4, 6, 7, g[1,2], b[1,2], 9)[128,65] VIEW(10)[64,2] VIEW(10)[8192@512] CPY(12, c[8192]) "
    "RMS_NORM(11) VIEW(0)[3,256:16@4] CPY(15, s)[3,256]",
    "a convolution of tokens": "SSM_CONV(x[7,300,2], w[4,300])[300,4,2] ADD(0, b[300]) SILU(1)",
    "scans": "SSM_SCAN(s[16,8,2,2], x[8,2,3], d[2,3], a[1,2], b[16,1,3], c[16,1,3], I)[304] VIEW(0)[48] "
    "VIEW(0)[256@192] CPY(2, e[256]) SSM_SCAN(s, x, d, f[16,2], b, c, I)[304] SCALE(4)",
    "several submissions": "SCALE(x[16,3]) " * 4 + " ".join(f"ADD({i}, x)" for i in range(600)),  # four chains
    "gate, whose reader's weights are ggml's": "MUL_MAT(W, x[256,3]) MUL_MAT(W, x) GLU(0, 1) MUL_MAT(A, 2)",
    "gate beside ggml's weights": "SCALE(y[256,3]) MUL_MAT(W, x[256,3]) MUL_MAT(A, x) GLU(1, 2) MUL_MAT(W, 3)",
    "gate beside weights at another offset": "MUL_MAT(W, x[256,3]) MUL_MAT(M, x) GLU(0, 1) MUL_MAT(W, 2)",
    "gates of experts": "SCALE(x[256,1,3]) MUL_MAT_ID(B, 0, H3)[256,2,3] MUL_MAT_ID(B, 0, H3)[256,2,3] GLU(1, 2) "
    "MUL_MAT_ID(B, 3, H3)[256,2,3]",
    "a norm in place of a product's row": "RMS_NORM(x[256])! MUL(0, a[256]) MUL_MAT(G, 1)[64] ADD(0, a)",
    "a norm of groups": "GROUP_NORM(x[16,4,4,2]) SCALE_ADD(0) CLAMP(1)",
    "heads that are a row": "RMS_NORM(x[64,4,3]) MUL(0, a[64]) RESHAPE(1)[256,3] MUL_MAT(W, 2)",
    "a norm of a sum and two more": FUSED["summed"].replace("MUL_MAT(W, 5)", "ADD(5, b[256]) MUL_MAT(W, 6)"),
    "a sum of nothing": "SUM(x[0])[1] SCALE(y[3])",
    "sums": "SUM_ROWS(x[300,3])[1,3] MEAN(x)[1,3] SUM(x)[1] ADD(0, 1) SUB(3, 2) DIV(x, 4)",
    "ropes": "ROPE(x[64,2,3], P) YARN(0, P) MROPE_ROPE(1, P) VISION_ROPE(2, P) IMROPE_ROPE(3, P) ROPE_BACK(4, P)",
    "rows": "SOFT_MAX(x[40,3,3]) ALIBI(0, m[40,3]) HALVES(1)[20,3,3] ADD_ID(2, e[20,9], J)",
    "orders": "ARGSORT(x[40,3]) ASCENDING(x) TOP_5(y[4099,2])[5,2] ASCENDING(z[5000,2])",
    "orders of equal values and NaN": "ROUND(x[5000,2]) ASCENDING(0) LOG(x) ARGSORT(2) TOP_1500(2)[1500,2] ARGSORT(0)",
    "a long order": "ROUND(y[70000]) TOP_1500(0)[1500] TOP_5(y)[5] ASCENDING(0)",
    "one operand": " ".join(f"{op.upper()}(x[70,3])" for op in UNARY_OPS),
    "a router by sigmoids": ROUTER,
    "a router without a gate": "ARGSORT(l[16,3]) VIEW(0)[4,3:64] RESHAPE(l)[1,16,3] GET_ROWS(2, 1)[1,4,3] "
    "RESHAPE(3)[4,3] SOFT_MAX(4)",
    "no router: the least": ROUTER.replace("ARGSORT", "ASCENDING"),
    "no router: the second to fifth": ROUTER.replace("3:64", "3:64@4"),
    "a sum that adds to its scale": "RMS_NORM(x[256,3]) SCALE_ADD(0) L2_NORM(1) SCALE_ADD(2)",
    "a row that is written, too": "RMS_NORM(x[256,3]) VIEW(v[256,3])[256,1] MUL(0, 1) ADD(v, 2)!",
    "a window that is written meanwhile": "CONCAT(s[3,256], x[1,256])[4,256] VIEW(0)[3,256:16@4] CPY(1, s)[3,256] "
    "SSM_CONV(0, w[4,256])[256]",
    "a ROPE on the norm's factors": "RMS_NORM(x[64,4,3]) MUL(0, a[64,4,3]) ROPE(1, P)=a+256",
    "a product on the norm's operand": FUSED["rms"] + "=x+0",
    "a norm of what is written meanwhile": "RMS_NORM(x[256]) MUL(0, a[256]) SCALE(x)! MUL_MAT(G, 1)[64]",
    "a state that is written meanwhile": FUSED["gathered"].replace(" GATED", " SCALE(s)! GATED"),
    "a sum on what was added": FUSED["experts"] + "=a+4",
    "a router's weights on its order": FUSED["router"] + "=2+64",
    "a router's scale of some": ROUTER.replace("SCALE_ADD(6)", "RESHAPE(6)[4,3] VIEW(7)[2,3:16] SCALE_ADD(8)"),
    "a router that adds to another order": "SOFT_MAX(l[16,4,4]) PERMUTE(0)[16,4,4:256,64] ADD(1, b[16]) ARGSORT(2) "
    "VIEW(3)[4,16:64] RESHAPE(0)[1,16,16] GET_ROWS(5, 4)[1,4,16]",
    "a state's number under the result": "ARGSORT(r[2]) VIEW(0)[1] GET_ROWS(s[128,2], 1)[128] RESHAPE(2)[8,8,2] "
    "GATED_DELTA_NET(q[8,2,3], k[8,1,3], v[8,2,3], g[1,2,3], b[1,2,3], 3)[16,11]=0+0",
    "states that are rows of one": FUSED["states"]
    .replace("GATED_DELTA_NET", "TWO_STATES")
    .replace("16,11", "16,19")
    .replace("128@192", "256@192")
    .replace("c[128])", "c[128,2])[128,2]"),
    "a scan's states beside their row": "SSM_SCAN(s[16,8,2,3], x[8,2,3], d[2,3], a[1,2], b[16,1,3], c[16,1,3], I)[304] "
    "VIEW(0)[256@192] VIEW(s)[256@1536] CPY(1, 2)",
    "heads that are no whole blocks": "RMS_NORM(x[16,16,3]) RESHAPE(0)[256,3] MUL_MAT(W, 1)",
}
SUM = FUSED["experts"].removesuffix(" ADD(4, b[128,3])")
PARTS = [  # of a random graph: the last result is one of 256 x 3, or repeats in one
    *(["ADD(x[256,3], y[256,3])", "MUL(x[256,3], y[256,3])", "ADD(x[256,3], y[256])", "MUL(x[256,3], y[256])"] * 2),
    *(["MUL_MAT(W, x[256,3])", "RMS_NORM(x[256,3])", "SCALE(x[256,3])", "SILU(x[256,3])", "RESHAPE(x[256,3])"] * 2),
    *("NORM(x[256,3])", "L2_NORM(x[256,3])", "RMS_NORM(x[256,3]) MUL(0, y[256]) MUL_MAT(W, 1)"),
    *(FUSED["gated"], f"{FUSED['turned']} RESHAPE(2)[256,3]"),
    *(f"{SUM} RMS_NORM(4)", f"{FUSED['experts']} RMS_NORM(5) MUL(6, c[128])"),
    f"{FUSED['normed']} RESHAPE(6)[128] ADD(0, 7)",
    f"{FUSED['activated']} VIEW(2)[64,4:256] RMS_NORM(3) RESHAPE(4)[256]",
    *(f"{FUSED['states']} VIEW(0)[16,3]", f"{FUSED['gathered']} VIEW(2)[128@192] CPY(3, s)[128] VIEW(2)[16,3]"),
    *(FUSED["router"], ROUTER, ROUTER.replace(" SCALE_ADD(6)", "")),
]


def random_graph(rng: Any) -> Graph:
    shape = 256, 3, 1, 1
    nodes = [Node("", (), shape)] * 4

    def leaf(ne: tuple[int, ...]) -> int:
        whole = [i for i, node in enumerate(nodes) if node.ne == shape]
        source = int(rng.choice(whole[-3:] if rng.random() < 0.8 else whole))
        if ne == shape:
            return source
        nodes.append(Node("VIEW", (source,), ne, (), 1024 * int(rng.integers(3)) if ne[:2] == (256, 1) else 0))
        return len(nodes) - 1

    while len(nodes) < 20:
        begin = len(nodes)
        read(str(rng.choice(PARTS)), nodes, leaf)
        if nodes[-1].ne != shape:
            nodes.append(Node("ADD", (leaf(shape), len(nodes) - 1), shape))
        for i, node in enumerate(nodes[begin:], begin):
            place = node.op in PLAIN and nodes[node.sources[0]].ne == node.ne and rng.random() < 0.2
            place = place and all(nodes[j].op != "VIEW" for j in node.sources)  # a row that others need
            nodes[i] = node._replace(in_place=place, output=rng.random() < 0.05)
    return Graph(nodes, rng)
