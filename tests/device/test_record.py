"""Attention recorded in a host program's own kp.Sequence, on its own kp.Manager."""

from dataclasses import replace

import numpy as np
import pytest
from page_tables import check_counts, largest
from support import same

import zinc_attn as za
from zinc_attn import errors
from zinc_attn.cache import rows

kp = pytest.importorskip("kp", reason="kp is not installed: scripts/run builds it")
SHAPE = za.AttnShape(4, 2, 64)


@pytest.fixture
def host():
    with za.Device.open(runtime="kompute") as device:
        manager = kp.Manager(device.info.index)
    with za.Device.from_kompute(manager, device.info.index) as device:
        yield manager, device


class Recorded:
    """A cache, a sequence of it, and a call for each layer that a host's kp.Sequence holds.

    new_rows: that each step appends, 0 for none.
    """

    def __init__(self, host, layers=2, dtype="f16", page_size=64, q_len=1, new_rows=1, scoring=None, **options):
        manager, device = host
        self.cache = za.KVCache(device, SHAPE, layers, 4096, dtype, page_size)
        self.attention, self.seq = za.Attention(self.cache, **scoring or {}), self.cache.new_sequence()
        self.q = manager.tensor_t(np.zeros(q_len * SHAPE.q_heads * SHAPE.k_dim, np.float32))
        words = max(new_rows, 1) * self.cache.row_words
        self.rows = [manager.tensor_t(np.zeros(words, np.uint32)) for _ in range(layers)]
        self.sequence = manager.sequence()
        self.sequence.record(kp.OpTensorSyncDevice([self.q, *self.rows]))
        given = self.rows if new_rows else [None] * layers
        self.calls = [
            self.attention.record(self.sequence, self.q, self.seq, layer, new, **options)
            for layer, new in enumerate(given)
        ]

    def step(self, q, *of_layers, **options):
        """Evaluate a step; of_layers: k and v of the new rows, by layer."""
        self.q.data()[:] = q.reshape(-1)
        for tensor, given in zip(self.rows, of_layers, strict=False):
            tensor.data()[:] = rows.encode(*given, self.cache.shape, self.cache.dtype).reshape(-1)
        with self.calls[0].step(*self.calls[1:], **options):
            self.sequence.eval()

    def check(self, layer, want, label=None):
        """The bits of a call's out and lse."""
        got, size = self.calls[layer].out.data().view(np.float32), sum(x.size for x in want)
        same([got[:size]], [np.concatenate([x.reshape(-1) for x in want])], (layer, label))

    def close(self):
        for call in self.calls:
            call.close()
        self.cache.close()


def queries(rng, n=1):
    return rng.standard_normal((n, SHAPE.q_heads, SHAPE.head_dim), np.float32)


def test_a_window_that_begins_within_a_node(host, rng):
    """Lengths at which the window's keys lie in fewer nodes than the recording has splits."""
    k, begin = rng.standard_normal((2050, 2, 64), np.float32), 0
    recorded = Recorded(host, layers=1, dtype="f32", page_size=256, new_rows=0, scoring={"window": 1000})
    assert recorded.calls[0].splits == 3
    for n in (5, 600, 1000, 1010, 1024, 1025, 1500, 1536, 2048, 2050):
        recorded.cache.append(recorded.seq, 0, k[begin:n], k[begin:n])
        begin, q = n, queries(rng)
        recorded.step(q)
        recorded.check(0, za.reference.emulate(q, k[:n], k[:n], window=1000), n)
    recorded.close()


@pytest.mark.parametrize(("causal", "alibi"), ((True, None), (False, np.exp2(-np.arange(1, 5)).astype(np.float32))))
def test_each_step_has_a_mask_of_its_own(host, rng, causal, alibi):
    """Trees of three tokens: masks of several widths, none, and another one for each layer."""
    k = rng.standard_normal((2, 700, 2, 64), np.float32).astype(np.float16)
    recorded = Recorded(host, q_len=3, new_rows=3, scoring={"alibi": alibi}, causal=causal, mask_keys=600)
    for n, width in ((3, 3), (60, 0), (67, 67), (580, 3), (583, None), (586, 569), (640, 600), (643, "each")):
        at = len(recorded.seq)
        for layer in range(2 if at < n - 3 else 0):
            recorded.cache.append(recorded.seq, layer, k[layer, at : n - 3], k[layer, at : n - 3])
        masks = [None, np.array([[1, 0, 1], [1, 1, 0], [0, 1, 1]], bool)]
        if width is None:
            masks = [None, None]
        elif width != "each":
            values = rng.standard_normal((3, width), np.float32)
            masks = [np.where(rng.random((3, width)) < 0.3, np.float32(-np.inf), values)] * 2
        for call in recorded.calls:
            call.allow_empty = n == 3  # such a mask may hide all that there is
        q = queries(rng, 3)
        recorded.step(q, *([one[n - 3 : n]] * 2 for one in k), mask=masks if width == "each" else masks[0])
        for layer, keys in enumerate(k[:, :n]):
            want = za.reference.emulate(q, keys, keys, alibi=alibi, causal=causal, mask=masks[layer])
            recorded.check(layer, want, n)
    recorded.close()


def test_refused_masks_and_failed_steps_leave_the_sequence(host):
    """test_bias.py has the other masks that a call refuses."""
    slopes = {"mask_slopes": np.full(SHAPE.q_heads, 2.0**51, "f")}
    recorded, plain = Recorded(host, mask_keys=2, scoring=slopes), Recorded(host).calls[0]
    first, second = recorded.calls
    for mask, error, text in (
        (np.ones((1, 2), bool), errors.ShapeError, r"^mask: got shape \(1, 2\), .* of which there are 1$"),
        (np.zeros((1, 1), bool), errors.ArgumentError, "^mask: row 0 sees no key"),
        (np.full((1, 1), -(2.0**50), np.float32), errors.ValueRangeError, "^mask, mask_slopes: got "),
        ([None], errors.ArgumentError, r"^mask: got 1 entries, expected an array or one per call \(2\)$"),
    ):
        with pytest.raises(error, match=text), first.step(second, mask=mask):
            pytest.fail("the step began")
    for _ in range(3):
        with first.step(second, mask=np.ones((1, 1), bool)):
            recorded.sequence.eval()
    with pytest.raises(KeyboardInterrupt), first.step(second):
        raise KeyboardInterrupt
    with pytest.raises(errors.LimitError, match=r"^mask: got 3 keys, expected at most mask_keys = 2$"):
        first.step(second, mask=np.ones((1, 3), bool)).__enter__()
    with pytest.raises(errors.ArgumentError, match=r"^mask: got one, expected None: no call of the step was "):
        plain.step(mask=np.ones((1, 1), bool)).__enter__()
    assert recorded.seq.lengths == (3, 3)
    for name, value in (("mask_keys", -1), ("mask_keys", recorded.cache.pool.capacity + 1), ("causal", 2)):
        with pytest.raises(errors.ArgumentError, match=f"^{name}: got {value}"):
            Recorded(host, **{name: value})
    check_counts(recorded.cache.pool, [recorded.seq.pages])


def test_a_call_examines_what_steps_appended(host):
    """A bound on scores that nobody knows is not taken for 0: of a sequence, of its fork, and where rows moved on."""
    recorded = Recorded(host, layers=1, dtype="f32", page_size=16, max_tokens=32)  # less than the pages of a leaf
    cache, seq, attn = recorded.cache, recorded.seq, recorded.attention
    q, row = np.ones((4, 64), np.float32), np.ones((2, 64), np.float32)

    def step(value: float) -> None:
        with recorded.calls[0].step():
            k = np.full_like(row, value)[None]
            recorded.rows[0].data()[:] = rows.encode(k, np.ones_like(k), SHAPE, "f32").reshape(-1)
            recorded.sequence.eval()

    attn(q, seq, 0, row, row)
    step(3.0)
    step(2.0**60)
    assert largest(cache) == (1, 1)
    fork = seq.fork()
    cache.append(fork, 0, row, row)
    seq.truncate(2)
    want = za.reference.emulate(q, np.stack([row, 3 * row]), np.stack([row, row]))[0]
    same([attn(q, seq, 0)], [want])
    assert largest(cache) == (3, 1)
    for ask in (attn, lambda *arguments: attn.submit(*arguments).result(), attn.partial):
        with pytest.raises(errors.ValueRangeError, match=r"^q, k: got max\|q\| = 1.15\S+, max\|k\| = 1.15"):
            ask(np.float32(2.0**60) * q, fork, 0)
    attn(q, fork, 0)
    for value in (np.nan, -np.inf, 2.0**61, 2.0**-41):
        step(1.0)
        step(value)
        for ask in (lambda: attn(q, seq, 0, row, row), lambda: attn(q, seq.fork(), 0), lambda: seq.save("unused")):
            with pytest.raises(errors.ValueRangeError, match=r"^rows: .* token 3 of layer 0, .*; truncate\(3\) "):
                ask()
        seq.truncate(3)
        assert np.isfinite(attn(q, seq, 0)).all()
        step(value)
        seq.keep([1], 2)
        with pytest.raises(errors.ValueRangeError, match=r"^rows: .* token 2 of layer 0, "):
            attn(q, seq, 0)
        seq.truncate(2)
    recorded.close()


def test_refusals(host, device):
    manager = host[0]
    recorded = Recorded(host, max_tokens=1)
    attn, seq, first, new = recorded.attention, recorded.seq, recorded.calls[0], recorded.rows[0]
    with first.step():
        pass
    with pytest.raises(errors.LimitError, match=r"^seq: 2 tokens, expected at most max_tokens = 1$"), first.step():
        pass
    short = manager.tensor_t(np.zeros(7, np.float32))
    for q, words, options, error, text in (
        (short, new, {}, errors.ShapeError, r"^q: got a tensor of 7 elements, expected q_len \* 256$"),
        (recorded.q, short, {}, errors.ShapeError, r"^rows: got a tensor of 7 words, expected tokens \* "),
        (recorded.q, new, {"max_tokens": 0}, errors.ArgumentError, r"^max_tokens: got 0, "),
    ):
        with pytest.raises(error, match=text):
            attn.record(manager.sequence(), q, seq, 0, words, **options)
    blocks = za.Attention(za.KVCache(host[1], SHAPE, 1, 64, "q8_0"), arithmetic="integer")
    with pytest.raises(errors.UnsupportedError, match=r"^record: got arithmetic 'integer', whose q the host rounds; "):
        blocks.record(manager.sequence(), recorded.q, blocks.cache.new_sequence(), 0)
    with pytest.raises(errors.DTypeError, match=r"^arithmetic: got 'integer' with a cache of f16, expected types "):
        za.Attention(recorded.cache, arithmetic="integer")
    other = za.KVCache(device, SHAPE, 1, 64)
    with pytest.raises(errors.RuntimeUnavailableError, match=r"^record: got .*, expected a Device.from_kompute$"):
        za.Attention(other).record(None, None, other.new_sequence(), 0)


@pytest.mark.parametrize("most", (4, 64))
def test_a_grid_has_no_more_workgroups_than_the_device(host, rng, monkeypatch, most):
    """Where the nodes of all rows are more, splits have several nodes. Rows that alone are more are refused."""
    manager, device = host
    many = manager.tensor_t(np.zeros(5 * SHAPE.q_heads * SHAPE.head_dim, np.float32))
    with monkeypatch.context() as patch:
        patch.setattr(device.runtime, "info", replace(device.info, max_workgroups=(65535, most, 65535)))
        recorded = Recorded(host, layers=1, dtype="f32", page_size=256, q_len=3, new_rows=0)
        if most == 4:
            with pytest.raises(errors.LimitError, match="q: got 5 rows, expected at most 4"):
                recorded.attention.record(manager.sequence(), many, recorded.seq, 0)
    k, v = rng.standard_normal((2, 1400, SHAPE.kv_heads, SHAPE.head_dim), np.float32)
    recorded.cache.append(recorded.seq, 0, k, v)
    key, q = recorded.calls[0]._workspace.key, queries(rng, 3)
    assert key.items <= most
    recorded.step(q)
    recorded.check(0, za.reference.emulate(q, k, v)[:1])
    recorded.close()
