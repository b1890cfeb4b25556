"""The entry point of ``python -m pccl.stress``, which ``pccl stress`` runs."""

from __future__ import annotations

from pccl.stress.commands import main

if __name__ == "__main__":
    main(prog_name="pccl stress")
