"""The communication hook for DDP. DDP looks at its annotations, so these are no strings here."""

from typing import Any

from torch import Tensor
from torch._C._distributed_c10d import GradBucket  # pyright: ignore[reportPrivateImportUsage]
from torch.futures import Future

from pccl.bindings.process_group.group import run_group


def ddp_hook(group: Any, bucket: GradBucket) -> Future[Tensor]:
    """Average the gradients of DDP: ``model.register_comm_hook(None, pccl.torch.ddp_hook)``.

    As DDP does without a hook; and with ``Options(lost_members="rescale")`` the average is over the
    live ranks.

    Args:
        group: process group; None: the default one.
        bucket: the gradients.

    Raises:
        TypeError: the process group has another backend.
    """
    which = run_group(group)
    gradients = bucket.buffer().div_(which.size())
    work: Any = which.sum_gradients(gradients)
    mean: Future[Tensor] = work.get_future().then(_first)
    return mean


def _first(future: Future[list[Tensor]]) -> Tensor:
    return future.value()[0]
