"""Reports of progress, which tools give their callers."""

from collections.abc import Callable

Progress = Callable[[str, int, int], None]  # what is being done, steps done, steps in all


class Steps:
    """Counts the steps of a tool and tells ``progress``, where there is one, what begins."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress, self.total, self.done = progress, total, 0

    def begin(self, what: str, steps: int = 1) -> None:
        """Say what begins; it counts as ``steps`` when the next step begins."""
        if self._progress:
            self._progress(what, self.done, self.total)
        self.done += steps

    def finish(self) -> None:
        self.done = self.total
        self.begin("done", 0)
