"""``MasterKeys``: the key and the tokens of a master, as its file has them."""

from __future__ import annotations

import logging

from pccl.machines.master.events import TokensChanged
from pccl.machines.master.machine import MasterMachine
from pccl.machines.master.tokens import OPEN, Tokens
from pccl.protocol.errors import LocalProtocolError
from pccl.protocol.handshake.keys import fingerprint_of
from pccl.protocol.handshake.token import RunToken, parse_token
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
        self._trouble = ""
        """Error of the last attempt to use the file; empty if it succeeded."""
        given = None if token is None else parse_token(token)

        def with_given(tokens: Tokens) -> Tokens:
            if given is None or given.number:
                return tokens
            return tokens.with_plain(given.secret, 0)

        if file is not None:
            file.update(with_given)
            self.known = file.read()
        else:
            self.known = RunKeys(secret, with_given(OPEN))
        """The keys as the file has them."""
        if given is not None and given.number:
            token_there = self.known.tokens.get(given.number)
            if token_there is None or self.known.token_of(token_there) != given:
                raise LocalProtocolError(
                    func="master",
                    reason="the token is of another run: unset PCCL_TOKEN here, or for a standby "
                    "or another start of that run's master, give its file with --keys",
                )

    @property
    def is_open(self) -> bool:
        """Whether any process may join the run."""
        return not self.known.tokens.known

    def apply(self, credentials: Credentials, machine: MasterMachine) -> None:
        """Let handshakes use the tokens that the run has now."""
        tokens = self.known.tokens
        newest = tokens.newest()
        own = None if newest is None else RunToken(newest.secret, newest.number)
        if own is not None and own.number and self._file is not None:
            # A plain secret names no run: the master that a standby asks may have another key.
            fingerprint = fingerprint_of(credentials.signer.key)
            own = RunToken(own.secret, own.number, fingerprint)
        secrets = {token.number: token.secret for token in tokens.known}
        credentials.accept_tokens(secrets, own, machine.admission.accepts)

    def look(self, clock: Clock, machine: MasterMachine) -> TokensChanged | None:
        """Once a second, return the tokens if a command has changed them."""
        now_ns = clock.now_ns()
        if self._file is None or now_ns - self._looked_ns < NS_PER_S:
            return None
        self._looked_ns = now_ns
        self._kept = None  # members may have left since, and a failed write is repeated
        changed: TokensChanged | None = None
        try:
            if self._file.has_changed():
                known = self._file.read()
                if known.secret != self.known.secret:
                    raise LocalProtocolError(reason=f"{self._file.path} has another run's key")
                self.known = known
                changed = TokensChanged(known.tokens.spend_like(machine.admission.tokens))
        except LocalProtocolError as error:
            self._complain(error)
        else:
            self._trouble = ""
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
            self._complain(error)

    def _complain(self, error: LocalProtocolError) -> None:
        if error.reason != self._trouble:
            _log.warning("the tokens of this run stay as they are: %s", error.reason)
        self._trouble = error.reason
