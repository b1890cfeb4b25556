"""Who a process group is, as torch asks for it."""

from __future__ import annotations

from datetime import timedelta

from pccl.bindings.process_group.team import Team


class GroupIdentity:
    """Ranks and names of a process group.

    Args:
        team: its members.
        name: its name, the same on all of them.
        timeout: longest time of a collective.
    """

    def __init__(self, team: Team, name: str, timeout: timedelta) -> None:
        self.team, self.timeout = team, timeout
        self._name, self._desc = name, ""

    def getRank(self) -> int:
        return self.team.rank

    def getSize(self) -> int:
        return self.team.size

    def rank(self) -> int:
        return self.team.rank

    def size(self) -> int:
        return self.team.size

    def getBackendName(self) -> str:
        return "pccl"

    name = _get_backend_name = getBackendName

    @property
    def group_name(self) -> str:
        return self._name

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    _set_group_name = setGroupName

    @property
    def group_desc(self) -> str:
        return self._desc

    def getGroupDesc(self) -> str:
        return self._desc

    def setGroupDesc(self, desc: str) -> None:
        self._desc = desc

    _set_group_desc = setGroupDesc

    def set_timeout(self, timeout: timedelta) -> None:
        self.timeout = timeout

    setTimeout = set_timeout
