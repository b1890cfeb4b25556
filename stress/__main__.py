"""The entry point of ``python -m pccl.stress``."""

from __future__ import annotations

from pccl.stress.commands import main

if __name__ == "__main__":
    main()
