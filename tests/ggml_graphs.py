"""Graphs of ggml's operations for test_ggml.py: their text, their memory, and NumPy's bits of each operation.

A text has a node after the other: ``OP(operands)[ne:nb@bytes]!^``. An operand is a node's number, a tensor that the test
gives (a capital), or a leaf (a letter and, at first, its sizes). ne: where it is not the first operand's; nb: from the
second dimension on, and bytes: of a view; !: the result lies where the first operand does; ^: it is an output.
"""

import ctypes as c
import re
import struct
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from c_host import ROOT
from engine import address

import zinc_attn as za
from zinc_attn.graph import moves, order, products, recurrent, rows
from zinc_attn.graph.declarations.elementwise import UNARY_OPS
from zinc_attn.graph.elementwise import add_id, binary, glu, unary
from zinc_attn.graph.rope import Rope, rope

NUMBERS = re.findall(r"\bGGML_OP_(\w+)", (ROOT / "tests/ggml/ggml.h").read_text().split("GGML_OP_COUNT")[0])
TOKENS, DIMS, EXPERTS = 3, 32, 4
SHAPE = 256, 3, 1, 1


class Op(NamedTuple):
    name: str  # ggml's
    params: bytes = b""
    compute: Callable[..., Any] | None = None  # of the operands, with ggml's first dimension last; None: a view


def flat(parts: Any) -> Any:
    return np.concatenate([part.ravel() for part in parts])


def turned(mode: str = "normal", number: int = 0, name: str = "ROPE", **numbers: Any) -> Op:
    r = Rope(DIMS, mode, sections=(8, 4, 4, 0), backward=name == "ROPE_BACK", **numbers)
    scales = r.freq_base, r.freq_scale, r.ext_factor, r.attn_factor, r.beta_fast, r.beta_slow
    params = struct.pack("5i6f5i", 0, DIMS, number, 0, r.n_ctx_orig, *scales, *r.sections, 0)
    return Op(name, params, lambda x, p: rope(x, p.reshape(4, TOKENS), r.table(), r.step))


def norm_of_groups(x: Any) -> Any:
    return rows.norm("norm", x.reshape(2, -1), 1e-5)


OPS = {name: Op(name) for name in ("VIEW", "RESHAPE", "PERMUTE")} | {
    **{x.upper(): Op("UNARY", np.int32(i).tobytes(), partial(unary, x)) for i, x in enumerate(UNARY_OPS[:22])},
    **{x.upper(): Op(x.upper(), b"", partial(unary, x)) for x in ("sqr", "sqrt", "log", "sin", "cos")},
    **{x.upper(): Op(x.upper(), b"", partial(binary, x)) for x in ("add", "sub", "mul", "div")},
    "XIELU": Op("UNARY", struct.pack("i4f", 17, 0.5, 0.75, 1.5, -0.25), lambda x: unary("xielu", x, 0.5, 0.75, 1.5, -0.25)),
    "SCALE": Op("SCALE", struct.pack("2f", 3, 0), lambda x: unary("scale", x, 3, 0)),
    "SCALE_ADD": Op("SCALE", struct.pack("2f", 3, 1), lambda x: unary("scale", x, 3, 1)),
    "CLAMP": Op("CLAMP", struct.pack("2f", 0.25, 1.5), lambda x: unary("clamp", x, 0.25, 1.5)),
    "LEAKY_RELU": Op("LEAKY_RELU", struct.pack("f", 0.125), lambda x: unary("leaky_relu", x, 0.125)),
    "FILL": Op("FILL", struct.pack("f", 0.75), lambda x: unary("fill", x, 0.75)),
    "GLU": Op("GLU", struct.pack("2i", 2, 0), partial(glu, "swiglu")),
    "HALVES": Op("GLU", struct.pack("2i", 1, 1), lambda x: glu("geglu", *np.split(x, 2, -1)[::-1])),
    "ADD_ID": Op("ADD_ID", b"", lambda a, b, ids: add_id(a[0], b[0, 0], ids[0, 0])),
    "RMS_NORM": Op("RMS_NORM", struct.pack("f", 1e-5), lambda x: rows.norm("rms", x, 1e-5)),
    "NORM": Op("NORM", struct.pack("f", 1e-5), lambda x: rows.norm("norm", x, 1e-5)),
    "L2_NORM": Op("L2_NORM", struct.pack("f", 1e-5), lambda x: rows.norm("l2", x, 1e-5)),
    "GROUP_NORM": Op("GROUP_NORM", struct.pack("if", 2, 1e-5), norm_of_groups),
    "SUM_ROWS": Op("SUM_ROWS", b"", rows.sum_rows),
    "MEAN": Op("MEAN", b"", lambda x: rows.sum_rows(x, np.float32(1) / np.float32(x.shape[-1]))),
    "SUM": Op("SUM", b"", lambda x: rows.sum_rows(x.reshape(-1))),
    "SOFT_MAX": Op("SOFT_MAX", struct.pack("f", 1), lambda x: rows.soft_max(x, 1)),
    "ALIBI": Op("SOFT_MAX", struct.pack("2f", 0.5, 8), lambda x, m: rows.soft_max(x, 0.5, m, **rows.slopes(8, x.shape[1]))),
    "ROPE": turned(freq_base=500.0),
    "YARN": turned("neox", 2, freq_scale=0.25, ext_factor=0.5, attn_factor=1.25, n_ctx_orig=512),
    "MROPE": turned("mrope", 8),
    "VISION": turned("vision", 24),
    "IMROPE": turned("imrope", 40),
    "ROPE_BACK": turned("neox", 2, "ROPE_BACK"),
    "ARGSORT": Op("ARGSORT", np.int32(1).tobytes(), lambda x: order.argsort(x, True)),
    "ASCENDING": Op("ARGSORT", b"", lambda x: order.argsort(x, False)),
    **{f"TOP_{k}": Op("TOP_K", b"", lambda x, k=k: order.top_k(x, k)) for k in (5, 1500)},
    "MUL_MAT": Op("MUL_MAT", b"", lambda w, x: products.multiply(w, x.reshape(-1, x.shape[-1]))),
    "MUL_MAT_ID": Op(
        *("MUL_MAT_ID", b""),
        lambda w, x, ids: products.of_experts(lambda e, x: products.multiply(w[e], x), len(w), x[0], ids[0, 0], 64),
    ),
    "FLASH_ATTN_EXT": Op(
        *("FLASH_ATTN_EXT", struct.pack("f", 0.125)),
        lambda q, k, v: za.reference.emulate(q[0].swapaxes(0, 1), k, v, causal=False, scale=0.125)[0],
    ),
    "GET_ROWS": Op("GET_ROWS", b"", lambda x, ids: moves.get_rows(x, ids.reshape(*x.shape[:2], -1))),
    "CPY": Op("CPY", b"", lambda x, _: x),
    "CONCAT": Op("CONCAT", b"", lambda *x: np.concatenate(x, -1)),
    "SSM_CONV": Op("SSM_CONV", b"", lambda x, w: recurrent.ssm_conv(x[0], w[0, 0])),
    "GATED_DELTA_NET": Op("GATED_DELTA_NET", np.int32(1).tobytes(), lambda *of: flat(recurrent.delta_net(*of))),
    "SSM_SCAN": Op(
        *("SSM_SCAN", np.int32(1).tobytes()),
        lambda s, x, dt, a, b, c, ids: flat(recurrent.ssm_scan(s, x, dt[0], a[0, 0], b, c, ids.ravel())),
    ),
}  # fmt: skip
VIEWS = [name for name, op in OPS.items() if op.compute is None]
PLAIN = {*map(str.upper, UNARY_OPS), "ADD", "SUB", "MUL", "DIV", "RMS_NORM", "NORM", "L2_NORM", "SOFT_MAX"}  # in any place


class Node(NamedTuple):
    op: str  # "": a leaf
    sources: tuple[Any, ...]  # numbers of nodes, and names of what the test gives
    ne: tuple[int, ...]
    nb: tuple[int, ...] = ()
    offset: int = 0
    in_place: bool = False
    output: bool = False

    @property
    def steps(self) -> tuple[int, ...]:
        steps = [4, *(self.nb or (4 * self.ne[0],))]
        while len(steps) < 4:
            steps.append(steps[-1] * self.ne[len(steps) - 1])
        return tuple(steps)


def sizes(text: str) -> tuple[int, ...]:
    ne = tuple(int(n) for n in text.split(",") if n)
    return ne and ne + (1,) * (4 - len(ne))


def read(text: str, nodes: list[Node], leaf: Callable[[tuple[int, ...]], int]) -> None:
    """The text's nodes go behind nodes."""
    letters: dict[str, int] = {}
    numbers: list[int] = []
    for op, operands, ne, nb, offset, flags in re.findall(
        r"(\w+)\(([^)]*)\)(?:\[([\d,]+)(?::([\d,]+))?(?:@(\d+))?\])?([!^]*)", text
    ):
        sources: list[Any] = []
        for name, of in re.findall(r"(\w+)(?:\[([\d,]+)\])?", operands):
            if name.islower() and name not in letters:
                letters[name] = leaf(sizes(of))
            sources.append(numbers[int(name)] if name.isdigit() else letters.get(name, name))
        like = nodes[sources[op.startswith("MUL_MAT")]].ne
        steps = tuple(int(n) for n in nb.split(",") if n)
        nodes.append(Node(op, tuple(sources), sizes(ne) or like, steps, int(offset or 0), "!" in flags, "^" in flags))
        numbers.append(len(nodes) - 1)


class Graph:
    """A result may get the memory of a value that no later node reads, as ggml's has."""

    def __init__(self, nodes: list[Node], rng: Any) -> None:
        self.nodes, self.root, self.begin = nodes, list[int](), list[int]()
        leaves, self.integers = [i for i, node in enumerate(nodes) if not node.op], set[int]()
        for i, node in enumerate(nodes):
            source = node.sources[node.op == "CPY"] if node.in_place or node.op in (*VIEWS, "CPY") else None
            self.root.append(i if source is None else self.root[source])
            self.begin.append(node.offset + (0 if source is None else self.begin[source]))
            if node.op and (self.root[i] in self.integers or OPS[node.op].name in ("ARGSORT", "TOP_K")):
                self.integers.add(i)
        last = dict.fromkeys(leaves, len(nodes))
        for i, node in enumerate(nodes):
            last |= {self.root[j]: max(i, last.get(self.root[j], 0)) for j in node.sources if not isinstance(j, str)}
        for i, root in enumerate(self.root):
            if nodes[i].output or root not in last:
                last[root] = len(nodes)
        self.bytes = max(4 * int(np.prod(node.ne)) for node in nodes) + 4095 & ~4095
        self.slot, self.kept = {i: n for n, i in enumerate(leaves)}, [i for i in last if last[i] == len(nodes)]
        for i, node in enumerate(nodes):
            if self.root[i] != i or not node.op:
                continue
            given = {j for j in node.sources if node.op in PLAIN and not isinstance(j, str)}
            shared = {j for j in given if self.root[j] == j and nodes[j].ne == node.ne}
            shared -= {self.root[j] for j in given - shared}
            taken = {self.slot[j] for j in self.slot if last[j] > i or (last[j] == i and j not in shared)}
            free = [slot for slot in range(len(leaves) + 6) if slot not in taken]
            self.slot[i] = int(rng.choice(free)) if free else max(taken) + 1

    @property
    def words(self) -> int:
        return (max(self.slot.values()) + 1) * self.bytes // 4

    def ends(self, words: Any) -> dict[int, Any]:
        """Of a memory, the words of what is not written again; every NaN as the same."""
        found = {i: words[self.slot[i] * self.bytes // 4 :][: int(np.prod(self.nodes[i].ne))] for i in self.kept}
        return {i: np.where(np.isnan(x.view(np.float32)), np.uint32(0x7FC00000), x) for i, x in found.items()}

    def oracle(self, words: Any, given: dict[str, Any]) -> dict[int, Any]:
        values: list[Any] = []
        for i, node in enumerate(self.nodes):
            kind, at = np.int32 if i in self.integers else np.float32, self.slot[self.root[i]] * self.bytes + self.begin[i]
            values.append(np.ndarray(node.ne[::-1], kind, words, at, node.steps[::-1]))
            compute = OPS[node.op].compute if node.op else None
            if compute:
                result = compute(*(given[j][1] if isinstance(j, str) else values[j] for j in node.sources))
                values[i][...] = result.reshape(values[i].shape)
        return self.ends(words)

    def run(self, back_end: Any, words: Any, given: dict[str, Any]) -> dict[int, Any]:
        """Behind the device's graph."""
        memory, tensors = back_end.memory(words), []
        for i, node in enumerate(self.nodes):
            if self.root[i] == i:
                kind = "i32" if i in self.integers else "f32"
                tensors.append(back_end.tensor(kind, *node.ne, buffer=memory[0], offset=self.slot[i] * self.bytes))
            else:
                tensors.append(back_end.view(tensors[node.sources[node.op == "CPY"]], node.ne, node.steps, node.offset))
            sources = [given[j][0] if isinstance(j, str) else tensors[j] for j in node.sources]
            if node.op:
                op = OPS[node.op]
                number = NUMBERS.index(op.name)
                assert back_end.describe(number, tensors[i], *sources, params=op.params, flags=2 * node.output), node
        back_end.graph([tensor for tensor, node in zip(tensors, self.nodes, strict=True) if node.op])
        found = np.empty(self.words, np.uint32)
        back_end.c.get_bytes(memory[1], c.c_void_p(address(found)), c.c_size_t(0), c.c_size_t(found.nbytes))
        return self.ends(found)


def named(text: str, rng: Any) -> Graph:
    nodes: list[Node] = []

    def leaf(ne: tuple[int, ...]) -> int:
        nodes.append(Node("", (), ne))
        return len(nodes) - 1

    read(text, nodes, leaf)
    return Graph(nodes, rng)


def router(gate: str, biased: bool, norm: str, scaled: bool) -> str:
    """Four of 16 experts; without a gate from ARGSORT on."""
    nodes: list[str] = []

    def put(text: str) -> str:
        nodes.append(text)
        return str(len(nodes) - 1)

    p = put(f"{gate}(l[16,3])") if gate else "l[16,3]"
    sorted_ = put(f"ARGSORT({put(f'ADD({p}, b[16])') if biased else p})")
    weights = put(f"GET_ROWS({put(f'RESHAPE({p})[1,16,3]')}, {put(f'VIEW({sorted_})[4,3:64]')})[1,4,3]")
    weights = put(f"RESHAPE({weights})[4,3]")
    if norm == "sum":
        total = put(f"SUM_ROWS({weights})[1,3]")
        weights = put(f"DIV({weights}, {put(f'CLAMP({total})')})")
    elif norm:
        weights = put(f"SOFT_MAX({weights})")
    if scaled:
        put(f"SCALE({weights})")
    return " ".join(nodes)


EXPERTS_SUM = "MUL(x[128,2,3], w[1,2,3]) VIEW(0)[128,3:1024] VIEW(0)[128,3:1024@512] ADD(1, 2) ADD(3, a[128,3])"
CONV, NET = "SSM_CONV(x[3,256], w[3,256])[256]", "GATED_DELTA_NET(q[8,2,3], k[8,1,3], v[8,2,3], g[1,2,3], b[1,2,3], "
FUSED = {  # the graph of each fusion, with all that it takes
    "addend": "MUL_MAT(W, x[256,3]) ADD(0, a[256])",
    "follower": "RMS_NORM(x[256,3]) MUL(0, a[256]) ADD(1, b[256,3])",
    "int8": "RMS_NORM(x[256,3]) MUL_MAT(W, 0)",
    "router": router("SOFT_MAX", True, "sum", True),
    "experts": f"{EXPERTS_SUM} ADD(4, b[128,3])",
    "summed": "MUL(x[256,2,2], w[1,2,2]) VIEW(0)[256,2:2048] VIEW(0)[256,2:2048@1024] ADD(1, 2) RMS_NORM(3) MUL(4, a[256]) "
    "MUL_MAT(W, 5)",
    "concat": "CONCAT(s[3,256], x[1,256])[4,256] SSM_CONV(0, w[4,256])[256]",
    "activated": f"{CONV} ADD(0, b[256]) SILU(1)",
    "normed": f"{CONV} VIEW(0)[64,2:256] L2_NORM(1) SCALE(2) VIEW(0)[64,2:256@512] L2_NORM(4) SCALE(5)",
    "states": f"{NET}s[8,8,2])[16,11] VIEW(0)[128@192] CPY(1, c[128])",
    "gathered": f"GET_ROWS(s[128,6], I)[128] RESHAPE(0)[8,8,2] {NET}1)[16,11]",
    "settled": "ROPE(x[64,4,3], P) PERMUTE(0)[64,3,4:1024,256] FLASH_ATTN_EXT(1, K, V)[64,4,3]",
}
ALONE = [op for op in OPS if OPS[op].name in ("UNARY", "SQR", "SQRT", "LOG", "SIN", "COS", "LEAKY_RELU", "FILL", "SCALE")]
GRAPHS = FUSED | {
    **{f"{op} in place": f"SCALE(x[256,3]) {op}(0)! MUL(1, a[256,3]) ADD(2, 0)" for op in ("RMS_NORM", "L2_NORM", "SILU")},
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
    "GATED_DELTA_NET(4, 6, 7, g[1,2], b[1,2], 9)[128,65] VIEW(10)[64,2] VIEW(10)[8192@512] CPY(12, c[8192]) RMS_NORM(11) "
    "VIEW(0)[3,256:16@4] CPY(15, s)[3,256]",
    "scans": "SSM_SCAN(s[16,8,2,2], x[8,2,3], d[2,3], a[1,2], b[16,1,3], c[16,1,3], I)[304] VIEW(0)[48] "
    "VIEW(0)[256@192] CPY(2, e[256]) SSM_SCAN(s, x, d, f[16,2], b, c, I)[304] SCALE(1)",
    "a norm of groups": "GROUP_NORM(x[16,4,4]) SCALE_ADD(0) CLAMP(1)",
    "sums": "SUM_ROWS(x[300,3])[1,3] MEAN(x)[1,3] SUM(x)[1] ADD(0, 1) SUB(3, 2) DIV(x, 4)",
    "ropes": "ROPE(x[64,2,3], P) YARN(0, P) MROPE(1, P) VISION(2, P) IMROPE(3, P) ROPE_BACK(4, P)",
    "rows": "SOFT_MAX(x[40,3,3]) ALIBI(0, m[40,3]) HALVES(1)[20,3,3] ADD_ID(2, e[20,9], J)",
    "orders": "ARGSORT(x[40,3]) ASCENDING(x) TOP_5(y[5000,2])[5,2] ASCENDING(y)",
    "a long order": "TOP_1500(y[5000,2])[1500,2]",
    "one operand": " ".join(f"{op}(x[70,3])" for op in ALONE),
    **{
        f"a router: {gate} {norm}": router(gate, biased, norm, scaled)
        for gate, biased, norm, scaled in (("SIGMOID", True, "", True), ("", False, "soft_max", False), ("SOFT_MAX", 0, "", 0))
    },
}
PARTS = [  # of a random graph: the last result repeats in one of 256 x 3
    f"{EXPERTS_SUM} RMS_NORM(4)",
    f"{EXPERTS_SUM} ADD(4, b[128,3]) RMS_NORM(5) MUL(6, c[128])",
    f"{FUSED['normed']} RESHAPE(6)[128] ADD(0, 7)",
    f"{FUSED['activated']} VIEW(2)[64,4:256] RMS_NORM(3) RESHAPE(4)[256]",
    f"{FUSED['states']} VIEW(0)[16,3]",
    f"{FUSED['gathered']} VIEW(2)[128@192] CPY(3, s)[128] VIEW(2)[16,3]",
    *(router(gate, bool(gate), norm, bool(norm)) for gate in ("SOFT_MAX", "SIGMOID") for norm in ("sum", "")),
]


def random_graph(rng: Any) -> Graph:
    nodes = [Node("", (), SHAPE)] * 4

    def leaf(ne: tuple[int, ...]) -> int:
        nodes.append(Node("VIEW", (int(rng.choice(whole())),), ne))
        return len(nodes) - 1

    def whole() -> list[int]:
        return [i for i, node in enumerate(nodes) if node.ne == SHAPE]

    simple = "VIEW RESHAPE MUL_MAT ADD MUL SILU SCALE RMS_NORM NORM L2_NORM ADD MUL SCALE PART".split()
    while len(nodes) < 16:
        op, near = str(rng.choice(simple)), whole()
        first, second = (int(rng.choice(near[-3:] if rng.random() < 0.8 else near)) for _ in range(2))
        output, place = rng.random() < 0.1, op in PLAIN and len(near) > 4 and rng.random() < 0.3
        if op == "VIEW":
            nodes.append(Node(op, (first,), (256, 1, 1, 1), (), 1024 * int(rng.integers(3)), False, output))
        elif op == "PART":
            read(str(rng.choice(PARTS)), nodes, leaf)
            nodes.append(Node("ADD", (first, len(nodes) - 1), SHAPE))
        else:
            rows_ = [i for i, node in enumerate(nodes) if node.ne == (256, 1, 1, 1)]
            if op in ("ADD", "MUL") and rows_ and not place and rng.random() < 0.3:
                second = int(rng.choice(rows_))
            sources = ("W", first) if op == "MUL_MAT" else (first, second) if op in ("ADD", "MUL") else (first,)
            nodes.append(Node(op, sources, SHAPE, (), 0, place, output))
    return Graph(nodes, rng)
