"""``python -m pccl.stress``: the harness's commands."""

from __future__ import annotations

from pccl.stress.commands import main

if __name__ == "__main__":
    main()
