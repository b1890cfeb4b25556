"""What forks of a process with torch need not import again."""

import contextlib
import gc
from importlib import import_module

for name in ("pytest", "pccl.aio", "pccl.master_node"):
    import_module(name)

with contextlib.suppress(ImportError):
    torch = import_module("torch")
    import_module("pccl.bindings.diloco")
    import_module("pccl.bindings.gradient_averager")
    torch.set_num_threads(1)
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)

gc.collect()
gc.freeze()  # garbage collections of the forks need not visit all this
