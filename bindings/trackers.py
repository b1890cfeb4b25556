"""Consumers of events for experiment trackers: Weights & Biases, MLflow, OpenTelemetry.

    import wandb
    from pccl.bindings.trackers import WandbWriter

    with wandb.init(project="gpt") as run:
        opt = DiLoCo(model.parameters(), inner=inner, comm=comm, on_event=WandbWriter(run))

Each takes the tracker's own object, and imports nothing itself. It never closes that object. Extras
install the packages: ``pccl[wandb]``, ``pccl[mlflow]``, ``pccl[otlp]``. All take the events of
:mod:`pccl.bindings.events`, and dataclasses of the program, as the consumers in
:mod:`pccl.bindings.consumers` do. The names of the curves are the same as in TensorBoard.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from pccl.bindings.arguments import check_count
from pccl.bindings.consumers import scalars, values_of
from pccl.bindings.events import Event, InnerStep
from pccl.checks import shown

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

__all__ = ["MlflowTarget", "MlflowWriter", "OtlpTarget", "OtlpWriter", "WandbTarget", "WandbWriter"]


class WandbTarget(Protocol):
    """The method of a run of ``wandb`` that this module calls."""

    def log(self, data: dict[str, Any], step: int | None = None) -> object:
        """Add one point to each of these curves."""
        ...


class MlflowTarget(Protocol):
    """The function of the module ``mlflow`` that this module calls."""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> object:
        """Add one point to each of these curves."""
        ...


class OtlpTarget(Protocol):
    """The method of a logger of OpenTelemetry that this module calls."""

    def emit(
        self,
        *,
        timestamp: int,
        severity_text: str,
        body: str,
        attributes: Mapping[str, Any],
        event_name: str,
    ) -> object:
        """Write one record."""
        ...


class _Curves:
    """The points that events add to curves. Events without a step are drawn at the last one."""

    def __init__(self, every_inner: int) -> None:
        self._every_inner = check_count("every_inner", every_inner)
        self._step = 0

    def points(self, event: Event | DataclassInstance) -> tuple[dict[str, float], int]:
        """Return the points by curve, and their step."""
        step = values_of(event).get("step")
        if isinstance(step, int):
            self._step = max(self._step, step)
        if isinstance(event, InnerStep) and event.step % self._every_inner:
            return {}, self._step
        return scalars(event), self._step


class WandbWriter:
    """Draws each number of each event in Weights & Biases, over the inner step.

    Events of the peer are drawn at the last step. A program that logs its own values with a step
    passes the same one: ``run.log({"loss": loss}, step=opt.inner_steps)``.

    Args:
        run: the result of ``wandb.init``.
        every_inner: as for :class:`~pccl.bindings.consumers.JsonlWriter`.

    Raises:
        TypeError: ``run`` has no ``log``; or, when called: the event is no dataclass instance.
        ValueError: ``every_inner`` is not at least 1.
    """

    def __init__(self, run: WandbTarget, *, every_inner: int = 1) -> None:
        self._log = _method(run, "log", "the result of wandb.init()")
        self._curves = _Curves(every_inner)

    def __call__(self, event: Event | DataclassInstance) -> None:
        """Draw the numbers of the event."""
        points, step = self._curves.points(event)
        if points:
            self._log(points, step=step)


class MlflowWriter:
    """Draws each number of each event in the active run of MLflow, over the inner step.

    Events of the peer are drawn at the last step.

    Args:
        target: the module ``mlflow``, or another object with its ``log_metrics``.
        every_inner: as for :class:`~pccl.bindings.consumers.JsonlWriter`.

    Raises:
        TypeError: ``target`` has no ``log_metrics``; or, when called: the event is no dataclass
            instance.
        ValueError: ``every_inner`` is not at least 1.
    """

    def __init__(self, target: MlflowTarget, *, every_inner: int = 1) -> None:
        self._log_metrics = _method(target, "log_metrics", "the module mlflow")
        self._curves = _Curves(every_inner)

    def __call__(self, event: Event | DataclassInstance) -> None:
        """Draw the numbers of the event."""
        points, step = self._curves.points(event)
        if points:
            self._log_metrics(points, step=step)


class OtlpWriter:
    """Writes each event as a log record of OpenTelemetry, named ``pccl.OuterStep`` and so on.

    The fields of the event become attributes. An exporter sends the records, for example:

        provider = LoggerProvider(resource=Resource({"service.name": "gpt"}))
        provider.add_log_record_processor(BatchLogRecordProcessor(OTLPLogExporter()))
        opt = DiLoCo(..., on_event=OtlpWriter(provider.get_logger("pccl")))

    Args:
        logger: the result of ``LoggerProvider.get_logger``.
        every_inner: as for :class:`~pccl.bindings.consumers.JsonlWriter`.

    Raises:
        TypeError: ``logger`` has no ``emit``; or, when called: the event is no dataclass instance.
        ValueError: ``every_inner`` is not at least 1.
    """

    def __init__(self, logger: OtlpTarget, *, every_inner: int = 1) -> None:
        self._emit = _method(logger, "emit", "the result of LoggerProvider.get_logger()")
        self._every_inner = check_count("every_inner", every_inner)

    def __call__(self, event: Event | DataclassInstance) -> None:
        """Write the event as one record."""
        values = values_of(event)
        if isinstance(event, InnerStep) and event.step % self._every_inner:
            return
        kind = type(event).__name__
        self._emit(
            timestamp=time.time_ns(),
            severity_text="INFO",
            body=kind,
            attributes={name: value for name, value in values.items() if value is not None},
            event_name=f"pccl.{kind}",
        )


def _method(target: object, name: str, wanted: str) -> Any:
    method = getattr(target, name, None)
    if not callable(method):
        raise TypeError(f"the argument must be {wanted}, not {shown(target)}")
    return method
