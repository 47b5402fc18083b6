"""The words of a plan's records in which the calls that it holds for differ: all that a steady call writes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..kernels.records import Records
from .call import Submission

Words = NDArray[np.uint32]


class SteadyWords(NamedTuple):
    """Views of the words of a submission that a steady call sets: of each slice's items, of the new rows, and of the
    query rows wherever they are kept. firsts, uploads: None where the calls have none."""

    submission: Submission
    window: int | None
    limits: list[Words]
    firsts: list[Words] | None
    uploads: list[Words] | None
    appends: Words
    rows: list[Words]

    @classmethod
    def of(
        cls, submission: Submission, window: int | None, items: Records, appends: Records, rows: Sequence[Records]
    ) -> SteadyWords:
        """Those of records that hold the submission's. window: of its options."""

        def words(name: str) -> list[Words]:
            return [items[name][span] for span in submission.spans]

        return cls(
            submission,
            window,
            words("limit"),
            None if window is None else words("first"),
            words("upload_begin") if submission.key.from_upload else None,
            appends["position"],
            [one["position"] for one in rows],
        )

    def set(self, lengths: Sequence[int]) -> None:
        """Make them those of requests of so many keys, for calls of the plan's ``steady_key``."""
        for at, one in enumerate(self.submission.slices):
            length = lengths[one.request]
            self.limits[at][...] = length
            for positions in self.rows:
                positions[at] = length - 1
            if self.firsts is not None and self.window is not None:
                self.firsts[at][...] = max(length - self.window, 0)
            if self.uploads is not None:
                self.uploads[at][...] = length - 1
        for at, request in enumerate(self.submission.uploads):
            self.appends[at] = lengths[request] - 1
