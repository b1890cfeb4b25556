"""What forks of a process with the trainers need not import again."""

import gc
from importlib import import_module

NAMES = (
    "accelerate",
    "lightning",
    "torch._dynamo",
    "torch._inductor.utils",
    "transformers.models.gpt2",
    "transformers.trainer",
)

for name in NAMES:
    import_module(name)

gc.collect()
gc.freeze()
