"""``Tokens``: with which tokens processes may join a run, and which keys may not come back.

A run without tokens is open: any process may join. A run with tokens always has a valid reusable
one, so a run never becomes open.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

REUSABLE_MAX = 2
"""How many reusable tokens are valid at a time: a rotated one stays until the next rotation."""

TOKENS_MAX = 1024
"""How many reusable tokens a run keeps, with revoked ones that members still need."""

TICKETS_MAX = 4096
"""How many tickets a run keeps. Spent ones stay, so that their processes can join again."""

EXPELLED_MAX = 4096


@dataclass(frozen=True, slots=True)
class Token:
    """One token of a run.

    Attributes:
        number: its number in the run; 0: a plain secret that the user has chosen.
        secret: what the owner proves to know.
        made_s: when it was made, in seconds since the epoch.
        is_ticket: whether only one process may join with it.
        revoked: whether only processes that have joined with it may still use it.
        owners: fingerprints of the processes that have joined with a ticket or a revoked token.
    """

    number: int
    secret: bytes = field(repr=False)
    made_s: int = 0
    is_ticket: bool = False
    revoked: bool = False
    owners: tuple[bytes, ...] = ()

    @property
    def is_spent(self) -> bool:
        """Whether a process has joined with this ticket."""
        return self.is_ticket and bool(self.owners)

    def flaw_for(self, fingerprint: bytes) -> str:
        """Return why the owner of a key may not join with this token; empty: it may."""
        if fingerprint in self.owners:
            return ""
        if self.revoked:
            return "its token was revoked; ask the operator of the master for a new one"
        return "its ticket is spent: another process has joined with it" if self.is_spent else ""


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens of a run. Changes return a new object.

    Attributes:
        known: the tokens, the oldest first.
        expelled: fingerprints of keys that never join again, the oldest first.
        last_number: the highest number that was given.
    """

    known: tuple[Token, ...] = ()
    expelled: tuple[bytes, ...] = ()
    last_number: int = 0

    def get(self, number: int) -> Token | None:
        """Return the token with this number, if the run still knows it."""
        return next((token for token in self.known if token.number == number), None)

    def reusable(self) -> list[Token]:
        """Return the valid reusable tokens, the oldest first."""
        return [token for token in self.known if not token.is_ticket and not token.revoked]

    def newest(self) -> Token | None:
        """Return the newest valid reusable token; None: the run is open."""
        return self.reusable()[-1] if self.known else None

    def flaw(self, number: int, fingerprint: bytes) -> str:
        """Return why the owner of a key may not join with a token; empty: it may."""
        if not self.known:
            return ""
        token = self.get(number)
        return "its token is not valid any more" if token is None else token.flaw_for(fingerprint)

    # -- changes -------------------------------------------------------------------------------

    def make(self, secret: bytes, made_s: int, *, is_ticket: bool = False) -> Tokens:
        """Add a token, numbered ``last_number`` + 1.

        If two reusable tokens are valid, a further reusable one revokes the oldest.

        Raises:
            ValueError: the run has ``TOKENS_MAX`` tokens, or ``TICKETS_MAX`` tickets.
        """
        number = self.last_number + 1
        made = Token(number, secret, made_s, is_ticket)
        kept = self if is_ticket else self._revoke_oldest()
        return replace(kept, last_number=number)._add(made)

    def with_plain(self, secret: bytes, made_s: int) -> Tokens:
        """Add a plain secret as token 0, in place of another plain secret.

        The same secret stays what it is, for example revoked.

        Raises:
            ValueError: the run has ``TOKENS_MAX`` tokens.
        """
        old = self.get(0)
        if old is not None and old.secret == secret:
            return self
        others = tuple(token for token in self.known if token.number)
        return replace(self, known=others)._revoke_oldest()._add(Token(0, secret, made_s))

    def revoke(self, number: int) -> Tokens:
        """Revoke a token.

        Raises:
            ValueError: it is the only valid reusable token.
        """
        token = self.get(number)
        if token is None:
            return self
        if self.reusable() == [token]:
            raise ValueError("this is the only valid token: make another one first")
        return self._put(replace(token, revoked=True))

    def spend(self, number: int, fingerprint: bytes) -> Tokens:
        """Record that the owner of a key has joined with a token, if this is a ticket."""
        token = self.get(number)
        if token is None or not token.is_ticket or token.revoked or token.owners:
            return self
        return self._put(replace(token, owners=(fingerprint,)))

    def spend_like(self, other: Tokens) -> Tokens:
        """Record as spent what ``other`` knows to be spent."""
        merged = self
        for token in other.known:
            if token.is_spent:
                merged = merged.spend(token.number, token.owners[0])
        return merged

    def expel(self, fingerprint: bytes) -> Tokens:
        """Record that the owner of a key never joins again.

        Raises:
            ValueError: the run has expelled ``EXPELLED_MAX`` keys.
        """
        if fingerprint in self.expelled:
            return self
        if len(self.expelled) >= EXPELLED_MAX:
            raise ValueError(f"the run has expelled {EXPELLED_MAX} processes; start a new run")
        return replace(self, expelled=(*self.expelled, fingerprint))

    def used_by(self, owners: Mapping[int, Collection[bytes]]) -> Tokens:
        """Record who uses revoked tokens; forget those that nobody uses.

        A revoked plain secret stays, so that a restarted master that is given it knows that.

        Args:
            owners: by number: fingerprints of the present peers that have joined with a token.
        """
        known: list[Token] = []
        for token in self.known:
            users = tuple(sorted(owners.get(token.number, ())))
            if not token.revoked:
                known.append(token)
            elif users or not token.number:
                known.append(replace(token, owners=users))
        return replace(self, known=tuple(known))

    def _add(self, token: Token) -> Tokens:
        alike = sum(one.is_ticket is token.is_ticket for one in self.known)
        if alike >= (TICKETS_MAX if token.is_ticket else TOKENS_MAX):
            what = "tickets" if token.is_ticket else "tokens"
            raise ValueError(f"the run has {alike} {what}; revoke some: pccl token revoke NUMBER")
        return replace(self, known=(*self.known, token))

    def _revoke_oldest(self) -> Tokens:
        valid = self.reusable()
        if len(valid) < REUSABLE_MAX:
            return self
        return self.revoke(valid[0].number)

    def _put(self, changed: Token) -> Tokens:
        known = [changed if token.number == changed.number else token for token in self.known]
        return replace(self, known=tuple(known))


OPEN = Tokens()
"""The tokens of a run that any process may join."""
