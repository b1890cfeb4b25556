"""``Pace``: the latest call and the steps of one peer, from its messages to the master."""

from __future__ import annotations

from pccl.protocol.messages import Heartbeat, OperationRequest, RoundRequest, SyncRequest
from pccl.protocol.operation import name_tag
from pccl.protocol.status_report import Figures

NS_PER_US = 1000

Request = OperationRequest | RoundRequest | SyncRequest


class Pace:
    """How far one peer is.

    Attributes:
        called_ns: when its latest call arrived.
        step: the last step that it has reported; 0: none.
        loss: the last loss that it has reported; None: none.
        figures: the last other numbers that it has reported.
        step_us: time of a step between its last two reports, in microseconds; 0: unknown.
    """

    __slots__ = (
        "_beat_ns",
        "_request",
        "_sent_ns",
        "_stepped_ns",
        "called_ns",
        "figures",
        "loss",
        "step",
        "step_us",
    )

    def __init__(self) -> None:
        self._request: Request | None = None
        self._stepped_ns = self._sent_ns = self._beat_ns = 0
        self.called_ns = 0
        self.step = 0
        self.step_us = 0
        self.loss: float | None = None
        self.figures: Figures = ()

    def called(self, request: Request, now_ns: int) -> None:
        """Record the request of a call."""
        self._request, self.called_ns = request, now_ns

    def beat(self, heartbeat: Heartbeat, now_ns: int) -> None:
        """Record a heartbeat. A lower step than before begins a new measurement."""
        if heartbeat.sent_ns:  # a long heartbeat has several parts, of which one has the time
            self._sent_ns, self._beat_ns = heartbeat.sent_ns, now_ns
        step, self.loss, self.figures = heartbeat.step, heartbeat.loss, heartbeat.figures
        if step == self.step:
            return
        passed_ns = now_ns - self._stepped_ns
        if self.step and step > self.step and passed_ns > 0:
            self.step_us = passed_ns // (step - self.step) // NS_PER_US
        elif step < self.step:
            self.step_us = 0
        self.step, self._stepped_ns = step, now_ns

    def echo(self, now_ns: int) -> tuple[int, int]:
        """Return ``sent_ns`` of the last heartbeat, once, and how long it was held; or zeros."""
        sent_ns, self._sent_ns = self._sent_ns, 0
        return (sent_ns, now_ns - self._beat_ns) if sent_ns else (0, 0)

    @property
    def last_call(self) -> str:
        """The latest call, as its callers know it; empty: none."""
        match self._request:
            case OperationRequest(operation=operation, descriptor=descriptor, among=among):
                return f"tag {name_tag(operation.tag, among)} ({descriptor})"
            case SyncRequest(offer=offer):
                return offer.purpose.call_name
            case RoundRequest(round=round_id):
                return round_id.kind.call_name
            case None:
                return ""
