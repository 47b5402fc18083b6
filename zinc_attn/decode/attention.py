"""Attention over sequences of a KVCache: append the new rows, attend, merge, in one submission per call.

A call goes in the five steps of ``Attention._walk``. On any exception before the last step nothing has happened.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import partial
from typing import Any

from ..cache.kv_cache import KVCache
from ..cache.sequence import Sequence
from ..canonical.arguments import check_scale, check_softcap, log2_biases, log2_slopes
from ..canonical.partial import PartialState
from ..checks import Uncopied, check_bool, check_int, described, shown
from ..errors import ArgumentError, RuntimeUnavailableError, UnsupportedError
from ..planning.arithmetic import Arithmetic
from ..planning.layouts import PlanFunction, SplitLayouts, fixed_layouts, split_rule_layouts
from ..runtime.protocol import HostSequences
from .arithmetic import check_arithmetic
from .host_sequence import RecordedAttention, RecordOptions
from .partial import NodeRange, PartialCall
from .pending import PendingAttention
from .requests import CallBatch, call_arguments, reserve_rows, takes
from .runner import AttentionCall, CallRunner, Observer
from .scoring import LayerScorings, Scoring


class Attention(Uncopied, instead="make one for the other cache"):
    """Attention of query rows over sequences of ``cache``.

    ``num_splits`` or ``split_size`` fix the layout of every call; neither: the split rule. The bits depend on neither.
    scale: not 0; None is 1 / sqrt(head_dim). window: a row sees no key before its own position - window + 1; or a list
    with an int or None per layer. softcap: scores become softcap * tanh(score / softcap). sinks: float32 (q_heads,), a
    logit per query head that joins the softmax without a value; or (num_layers, q_heads), or a list with an array or
    None per layer. alibi: float32 (q_heads,), a slope per query head: scores become score - slope * |key's position -
    row's position|. mask_slopes: float32 (q_heads,), the factor of a call's mask by query head (ggml's ALiBi).
    cascade: whether keys that rows of a call share, in pages that sequences share or within one sequence, are attended
    for several rows at once: where that saves enough (None), wherever it is possible (True), or never (False).
    arithmetic: "canonical", "fused" and "integer" have the same bits on every device: "fused" rounds a product and its
    sum once, and the sums of "integer" are of integers, for K and V in q8_0, q5_0, q4_0 or iq4_nl. "matrix" uses the
    device's matrix units (float16 factors, float32 sums; K and V of a type that float16 holds), with bits of its own on
    each device and driver; "matrix-prefill" does so for requests of at least 16 query rows times heads of a KV head
    alone. ArgumentError and its kinds for wrong arguments.

    For tools and tests: ``plan``, a function (tokens, q_len, window) -> SplitPlan, takes the place of the split rule;
    ``observer`` is called with every submission and its workspace before it is submitted.
    """

    def __init__(  # noqa: PLR0913  (public; all but the cache are keywords with a default)
        self,
        cache: KVCache,
        *,
        num_splits: int | None = None,
        split_size: int | None = None,
        scale: float | None = None,
        window: int | Seq[int | None] | None = None,
        softcap: float | None = None,
        sinks: Any = None,
        alibi: Any = None,
        mask_slopes: Any = None,
        cascade: bool | None = None,
        arithmetic: Arithmetic = "canonical",
        plan: PlanFunction | None = None,
        observer: Observer | None = None,
    ) -> None:
        if num_splits is not None and split_size is not None:
            raise ArgumentError(
                f"num_splits, split_size: got {shown(num_splits)}, {shown(split_size)}, expected at most one of the two"
            )
        if not isinstance(cache, KVCache):
            raise ArgumentError(
                f"cache: got {type(cache).__name__}, expected a KVCache (a ShardedKVCache has ShardedAttention)"
            )
        if cascade is not None and not isinstance(cascade, bool):
            raise ArgumentError(f"cascade: got {shown(cascade)}, expected True, False or None")
        shape = cache.shape
        self.cache, self.device = cache, cache.device
        self.num_splits, self.split_size = num_splits, split_size
        self.scale = check_scale(scale, shape.head_dim)
        common = Scoring(
            self.scale,
            softcap=check_softcap(softcap),
            biases=log2_biases({"alibi": alibi}, shape.q_heads),
            mask_slopes=log2_slopes("mask_slopes", mask_slopes, shape.q_heads),
        )
        self.arithmetic = check_arithmetic(arithmetic, cache.device, cache.dtype, shape)
        scorings = LayerScorings(cache, common, window, sinks)
        if plan is not None:
            layout = SplitLayouts(plan)
        elif num_splits is not None or split_size is not None:
            layout = fixed_layouts(shape, num_splits=num_splits, split_size=split_size)
        else:
            layout = split_rule_layouts(shape, cache.device.info.split_units)
        self._layout, self._runner = layout, CallRunner(cache, scorings, layout, cascade, observer, self.arithmetic)
        with cache.lock:
            cache.check_open()
            cache.users.purge()
            cache.users.add(self)

    def __repr__(self) -> str:
        return described(
            self,
            lambda: f"{self.cache!r}, num_splits={self.num_splits}, split_size={self.split_size}, {self.arithmetic}",
        )

    def close(self) -> None:
        """Free the command buffers and tensors; KVCache.close does it. A later call makes them anew."""
        with self.cache.lock:
            self.cache.settle()
            self._runner.close()

    @property
    def cascade(self) -> bool | None:
        """Whether keys that rows share are attended together; see the class."""
        return self._runner.cascade

    def window_of(self, layer: int) -> int | None:
        """Keys that a row of a layer sees at most, None for all."""
        return self._runner.scorings.by_layer[layer].window

    @property
    def keys_read(self) -> int:
        """Keys (of one KV head) that workgroups of the last call read; without ``cascade``, all that its rows see."""
        return self._runner.keys_read

    @property
    def shared(self) -> bool:
        """Whether workgroups of the last call read keys for several rows at once."""
        return self._runner.shared

    @property
    def recordings(self) -> int:
        """Command buffers recorded so far; steady decode adds none."""
        return len(self._runner.recordings)

    def prepare(self, tokens: int | None = None, *, batch: int = 1, q_len: int = 1) -> None:
        """Compile and record the programs of decode now, so that no later step has to. A second call makes none.

        tokens: keys that a sequence grows to at most; None: as many as the cache holds of ``batch`` sequences.
        batch: sequences of a call; q_len: query rows of each, as many as it appends. Sequences of different lengths,
        or with a common beginning, may need more programs, which their calls make. ArgumentError: beyond the cache.
        """
        batch = check_int("batch", batch, 1, self.cache.capacity)
        most = self.cache.capacity // batch
        tokens = check_int("tokens", most if tokens is None else tokens, 1, most)
        q_len = check_int("q_len", q_len, 1, tokens)
        with self.cache.lock:
            self.cache.check_open()
            self.cache.settle()
            self._runner.forget_last()
            self._runner.prepare(tokens, batch, q_len)

    def replan(self, cascade: bool | None) -> None:
        """Plan the next calls anew, because ``plan`` gives other layouts now; recordings are kept."""
        with self.cache.lock:
            self._layout.clear()
            self._runner.replan(cascade)

    @takes(call_arguments)
    def __call__(self, batch: CallBatch, layer: int) -> Any:
        """Append k, v to ``seq``, then attend; without k and v, attend only.

        q: (q_heads, head_dim) or (q_len, q_heads, head_dim), float32, float16 or bfloat16; k: (tokens, kv_heads,
        head_dim), v: (tokens, kv_heads, v_head_dim), or both without the first axis for one token, as the cache's dtype
        takes them; a latent cache takes k alone. Row i of q_len sees keys up to position tokens - q_len + i, with
        causal=False all keys. mask: (q_len, n) of the last n keys of the sequence, the new ones among them: bool, True
        where the row sees the key, or float32 or float16, which is added to the scores (natural units), -inf for a key
        that the row does not see; keys before them are seen. Returns out ([q_len,] q_heads, v_head_dim), float32; with
        return_lse (out, lse), lse ([q_len,] q_heads).
        A batch: ``seq`` a list, and q, k, v, out, lse, mask lists of arrays, one per sequence, lengths may differ;
        returns lists. Each output has the bits of the sequence attended alone.
        out, lse: C-contiguous float32 arrays, or torch tensors on the CPU, of the results' shapes, which the call fills
        and returns; they may share q's memory, but not each other's. allow_empty: rows that see no key are no error,
        and have output 0 and lse -inf, or the sinks' lse.
        A failed call leaves the cache, out and lse as they were; an interrupted call may have written to out, lse.
        ArgumentError and its kinds for wrong arguments; CapacityError: no room; StepError: others lack its rows.
        """
        with self.cache.lock:
            return self._walk(batch, layer)

    @takes(call_arguments)
    def submit(self, batch: CallBatch, layer: int) -> PendingAttention:
        """A call that does not wait for the device: ``submit(...).result()`` is what the call returns.

        Arguments as in a call; q, k and v may be written to again at once, out and lse from ``result()`` on. The next
        call of the cache, of any sequence, completes this one first; the next call of the device waits for it.
        """
        with self.cache.lock:
            pending: PendingAttention = self._walk(batch, layer, wait=False)
            return pending

    def partial(  # noqa: PLR0913  (public; all but q, seq and layer have a default)
        self,
        q: Any,
        seq: Sequence,
        layer: int,
        k: Any = None,
        v: Any = None,
        *,
        nodes: Any = None,
        tokens: int | None = None,
        within: tuple[int, int] | None = None,
        mask: Any = None,
    ) -> PartialState:
        """Append k, v to ``seq``, then attend without the last fold: a state per row and node of 512 keys.

        q, k, v as in a call; mask: as there, of the last keys of the whole sequence. nodes: the absolute numbers,
        ascending, of the nodes that ``seq`` holds, a shard of a longer sequence; None: 0, 1, ... tokens: of the whole
        sequence, whose last ones are the rows' own positions; None: those of ``seq``. within: (first, end) absolute
        nodes to attend, None for all. ``fold`` of the partials that together hold every node gives a call's bits.
        ArgumentError: tokens, nodes and ``seq`` do not fit each other.
        """
        span = NodeRange.checked(nodes, tokens, within)
        k, v, mask = [None if x is None else [x] for x in (k, v, mask)]
        batch, layer = call_arguments([q], [seq], layer, k, v, mask=mask, allow_empty=True)
        with self.cache.lock:
            state: PartialState = self._walk(batch, layer, partial(PartialCall, nodes=span))
            return state

    def _walk(
        self, batch: CallBatch, layer: int, check: Callable[..., AttentionCall] = AttentionCall, wait: bool = True
    ) -> Any:
        """The five steps of a call, and its results; without ``wait`` the PendingAttention that makes the last step."""
        cache, runner = self.cache, self._runner
        cache.settle()  # completes what was submitted before, also where the call has no sequence
        runner.forget_last()
        call = check(runner, batch, cache.check_layer(layer))  # 1. check
        try:
            transaction = reserve_rows(cache, call.requests, call.layer)
            plan = call.plan()  # 2. plan
            if plan.upload_first:
                runner.append(call)
            for submission in plan.submissions:
                call.take()  # results that this submission writes over
                workspace = runner.fill(submission, call, plan.steady is not None)  # 3. fill
                runner.start(workspace, call.layer)  # 4. run
            if not wait:
                cache.unfinished = PendingAttention(cache, call.results, transaction, call.largest)
                return cache.unfinished
            results = call.results()
            cache.commit(transaction, call.largest)  # 5. commit
        except BaseException:
            cache.unfinished = None  # a call that is undone writes nothing to ``out`` later
            runner.forget_last()  # sends what the call left in a ``together`` block
            cache.end()
            raise
        cache.end()
        return results

    def record(  # noqa: PLR0913  (public; all but the tensors, seq and layer have a default)
        self,
        sequence: Any,
        q: Any,
        seq: Sequence,
        layer: int,
        rows: Any = None,
        *,
        max_tokens: int | None = None,
        allow_empty: bool = False,
        causal: bool = True,
        mask_keys: int = 0,
    ) -> RecordedAttention:
        """Record this call's operations at the end of a host's kp.Sequence; nothing is evaluated.

        q: the host's kp tensor of float32 (q_len, q_heads, k_dim), zeros after head_dim; rows: None to attend only, or
        its tensor of the new tokens' rows as the cache stores them, ``rows.encode``'s layout (for f32: per token and KV
        head, K then V); max_tokens: the longest context that the recording serves, None for all that fit; allow_empty
        and causal as in a call; mask_keys: the last keys that a step's mask may have at most, with
        ``call.step(mask=...)``; steps without one may come in between.
        The call sees what the host wrote to q and rows before it. The host runs the sequence inside ``with
        call.step():``, must not use ``seq`` meanwhile, and records nothing into an evaluated sequence.
        One thread at a time uses a manager's queue, as Vulkan asks. The host must check a step's values, which the
        package does not see: q and rows as a call and an append take them, and max|q| * max|k| * head_dim * max(1,
        1.5 * |scale|, |scale| / softcap), plus the addends of biases and masks, at most 2**96. The next call on ``seq``
        and this layer that is no step, or a save, reads the rows back and checks them.
        """
        if not isinstance(self.device.runtime, HostSequences) or not self.device.runtime.hosted:
            name = self.device.runtime.name
            raise RuntimeUnavailableError(f"record: got runtime {name!r}, expected a Device.from_kompute")
        if self.arithmetic == "integer":
            raise UnsupportedError(
                "record: got arithmetic 'integer', whose q the host rounds; expected another, or a call"
            )
        for name, value, kind in (("sequence", sequence, "Sequence"), ("q", q, "Tensor"), ("rows", rows, "Tensor")):
            from_kp = type(value).__module__.split(".")[0] == "kp" and type(value).__name__ == kind
            if not from_kp and not (name == "rows" and value is None):
                raise ArgumentError(f"{name}: got {shown(value)}, expected a kp.{kind}")
        flags = check_bool("allow_empty", allow_empty), check_bool("causal", causal)
        options = RecordOptions(max_tokens, *flags, mask_keys)
        with self.cache.lock:
            layer = self.cache.check_layer(layer)
            self.cache.check_sequence(seq)
            return RecordedAttention(self._runner, sequence, q, seq, layer, rows, options)
