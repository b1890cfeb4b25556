"""Peers as plain functions on Modal, which have outbound connections only.

``modal run modal_peers.py --master HOST:PORT --peers 4``
"""

import subprocess

import modal

image = modal.Image.debian_slim().pip_install("pccl[torch]").add_local_file("train.py", "/train.py")
app = modal.App("pccl-peers", image=image)


@app.function(gpu="L4", retries=10, timeout=86400, secrets=[modal.Secret.from_name("pccl-token")])
def peer(master: str) -> None:
    """Run one peer. The secret sets ``PCCL_TOKEN``."""
    subprocess.run(["pccl", "join", master, "--", "python", "/train.py"], check=True)


@app.local_entrypoint()
def main(master: str, peers: int = 4) -> None:
    """Run all peers, and wait for them."""
    list(peer.map([master] * peers))
