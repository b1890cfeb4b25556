"""``MasterKeys``: the key and the tokens of a master, as its file has them."""

from __future__ import annotations

import logging

from pccl.machines.master.events import TokensChanged
from pccl.machines.master.machine import MasterMachine
from pccl.machines.master.tokens import OPEN, Tokens
from pccl.protocol.errors import LocalProtocolError
from pccl.protocol.handshake.token import parse_token
from pccl.protocol.types import NS_PER_S
from pccl.runtime.clock import Clock
from pccl.runtime.control.greeting import Credentials
from pccl.runtime.keys_file import KeysFile, RunKeys

_log = logging.getLogger("pccl.master")


class MasterKeys:
    """Takes up what commands write into the file of a run, and writes which tickets are spent.

    Args:
        file: the file; None: the key and the tokens are in memory only.
        token: text of the token that this master was given; None: none.
        secret: without a file: the secret of the run's key.

    Raises:
        LocalProtocolError: the file cannot be used, or the token is of another run.
    """

    def __init__(self, file: KeysFile | None, token: bytes | None, secret: bytes) -> None:
        self._file = file
        self._looked_ns = 0
        self._kept: Tokens | None = None
        """The tokens of the machine when this object wrote them last."""
        self._troubles: dict[str, str] = {}
        """What could not be done with the file at the last attempt -> why."""
        given = None if token is None else parse_token(token)

        def with_given(tokens: Tokens) -> Tokens:
            if given is None or given.number:
                return tokens
            after = tokens.with_plain(given.secret, 0)
            for old in tokens.reusable():
                if old.number and old not in after.reusable():
                    _log.warning("token %d is revoked: two are valid at a time", old.number)
            return after

        if file is not None:
            file.update(with_given)
            self.known = file.read()
        else:
            self.known = RunKeys(secret, with_given(OPEN))
        """The keys as the file has them."""
        if given is None:
            return
        same = self.known.tokens.get(given.number)
        if same is None or self.known.token_of(same) != given:
            raise LocalProtocolError(
                func="master",
                reason="the token is of another run; to continue that run, or to stand by for its "
                "master, give its keys (--keys FILE); for a new run, unset PCCL_TOKEN",
            )
        if same.revoked:
            _log.warning(
                "the token that this master was given is revoked, and lets no process join; "
                "`pccl token make` or `pccl token rotate` prints another one"
            )

    @property
    def is_open(self) -> bool:
        """Whether any process may join the run."""
        return not self.known.tokens.known

    def apply(self, credentials: Credentials, machine: MasterMachine) -> None:
        """Let handshakes use the tokens that the run has now."""
        tokens = self.known.tokens
        newest = tokens.newest()
        own = None if newest is None else self.known.token_of(newest)
        secrets = {token.number: token.secret for token in tokens.known}
        credentials.accept_tokens(secrets, own)

    def look(self, clock: Clock, machine: MasterMachine) -> TokensChanged | None:
        """Once a second, return the tokens if a command has changed them."""
        now_ns = clock.now_ns()
        if self._file is None or now_ns - self._looked_ns < NS_PER_S:
            return None
        self._looked_ns = now_ns
        self._kept = None  # members may have left since, and a failed write is repeated
        changed: TokensChanged | None = None
        try:
            self._file.make(self.known.secret, machine.admission.tokens)  # if it was deleted
            if self._file.has_changed():
                self.known = known = self._file.read()
                changed = TokensChanged(known.tokens.spend_like(machine.admission.tokens))
        except LocalProtocolError as error:
            self._complain("read", error)
        else:
            self._troubles.pop("read", None)
        return changed

    def keep(self, machine: MasterMachine) -> None:
        """Write which tickets are spent, and forget tokens that nobody needs any more.

        The master never waits for another process that changes the file: it tries again.
        """
        admission = machine.admission
        if self._file is None or admission.tokens is self._kept:
            return
        self._kept = admission.tokens
        if admission.needed() == self.known.tokens:
            return
        try:
            self._file.update(
                lambda tokens: admission.needed(tokens.spend_like(admission.tokens)), waits=False
            )
        except LocalProtocolError as error:
            self._complain("written", error)
        else:
            self._troubles.pop("written", None)

    def _complain(self, what: str, error: LocalProtocolError) -> None:
        if self._troubles.get(what) != error.reason:
            _log.warning("the tokens of this run cannot be %s: %s", what, error.reason)
        self._troubles[what] = error.reason
