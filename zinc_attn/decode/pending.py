"""A call that was submitted and whose result is taken later: ``Attention.submit``."""

from collections.abc import Callable
from typing import Any

from ..cache.kv_cache import KVCache
from ..cache.rows import Largest
from ..cache.transaction import Transaction
from ..checks import Uncopied


class PendingAttention(Uncopied, instead="take its result()"):
    """A call of ``Attention.submit``. Its new rows count from ``result()`` on, or from the cache's next call on.

    collect: takes the results of a finished device, also twice; transaction, largest: of the new rows, or None.
    """

    def __init__(
        self, cache: KVCache, collect: Callable[[], Any], transaction: Transaction | None, largest: Largest
    ) -> None:
        self._cache, self._transaction, self._largest = cache, transaction, largest
        self._collect: Callable[[], Any] | None = collect
        self._result: Any = None
        self._error: Exception | None = None

    def result(self) -> Any:
        """Wait for the device, and return the call's results, or raise its error; a second time the same."""
        with self._cache.lock:
            if self._cache.unfinished is self:
                self._cache.settle()
        try:
            if self._error is not None:
                raise self._error
            return self._result
        finally:
            del self  # the error keeps this frame; without ``self`` in it both are freed when they are dropped

    def complete(self) -> None:
        """Under the cache's lock: wait, take the results, let the new rows count; or keep the error and give back the
        new rows' pages. After Ctrl-C it may be called again."""
        self._error = None
        try:
            assert self._collect is not None
            self._result = self._collect()
            if self._transaction is not None and self._transaction.state == "open":
                self._cache.commit(self._transaction, self._largest)
        except Exception as error:
            self._error = error.with_traceback(None)
        self._cache.unfinished = self._collect = None
        self._cache.end()
