"""What programs for torch.distributed may import beside torch; see docs/torch-distributed.md."""

from pccl.bindings.process_group.ddp import ddp_hook
from pccl.bindings.process_group.group import Options, lost_ranks
from pccl.bindings.process_group.reconfigure import reconfigure
from pccl.bindings.process_group.registration import register
from pccl.bindings.process_group.team import RankLost

__all__ = ["Options", "RankLost", "ddp_hook", "lost_ranks", "reconfigure", "register"]

register()
