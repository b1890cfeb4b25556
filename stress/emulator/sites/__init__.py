"""A network of sites: a matrix of links between them, and a namespace of the kernel for each.

A proxy ends TCP, so the kernels at its sides see loopback. Here TCP runs from site to site: a
router forwards packets, so kernels measure the round trips and rates of the matrix. Needs root.

* ``matrix``: the sites, links and ports of a file.
* ``packets``: computes when each packet arrives, or that a queue drops it. Pure, in virtual time.
* ``tunnels``: makes the namespaces, each with one interface whose packets a program reads.
* ``router``: forwards the packets between the interfaces.
* ``command``: the command ``python -m pccl.stress sites``.

``*.toml`` are matrices: ``aws10``, ``gcp12`` and ``home8``. See ``docs/emulator.md``.
"""

from pccl.stress.emulator.sites.matrix import SiteMatrix, SitePort
from pccl.stress.emulator.sites.packets import PacketNetwork
from pccl.stress.emulator.sites.tunnels import SitesRefused, enter_site

__all__ = ["PacketNetwork", "SiteMatrix", "SitePort", "SitesRefused", "enter_site"]
