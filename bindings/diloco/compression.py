"""``Compression``: what fragments are reduced with, and what that has left out of them so far."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pccl
from pccl.bindings.diloco.rounds import Contribution


class Compression:
    """A format with error feedback; the options may bring their own.

    Args:
        options: a format; None: nothing is compressed.
    """

    def __init__(self, options: pccl.QuantizationOptions | None) -> None:
        self._options = options
        self.feedback = pccl.ErrorFeedback()

    def options(self, contribution: Contribution) -> pccl.QuantizationOptions | None:
        """What a contribution is reduced with. One without work neither owes nor pays."""
        options = self._options
        if options is None or options.error_feedback is not None or not contribution.weight:
            return options
        return replace(
            options, error_feedback=self.feedback, name=self._name(contribution.fragment)
        )

    def forget(self, fragment: int) -> None:
        """It is not known any more what is owed: what was may have been paid already."""
        options = self._options
        if options is None or options.error_feedback is None:
            self.feedback.forget(self._name(fragment))
        elif options.name is not None:
            options.error_feedback.forget(options.name)

    def state_dict(self) -> dict[str, Any]:
        """What is owed, by fragment."""
        return self.feedback.state_dict()

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Take over what ``state_dict`` gave."""
        self.feedback.load_state_dict(saved)

    @staticmethod
    def _name(fragment: int) -> str:
        return f"fragment {fragment}"
