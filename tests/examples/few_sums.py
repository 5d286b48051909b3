"""The quickstart's sums, as few as a shortened run needs: each run would encode all 10,000 first."""

from __future__ import annotations

from collections.abc import Sequence

from examples.quickstart.sums import Row, Sums


class FewSums(Sums):
    """Sums from all over the table, none of them held out."""

    def get_train_dataset(self) -> Sequence[Row]:
        """A hundredth of the training sums."""
        return super().get_train_dataset()[::100]

    def get_val_dataset(self) -> Sequence[Row]:
        """A sixteenth of the held-out sums."""
        return super().get_val_dataset()[::16]
