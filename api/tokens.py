"""Bearer tokens with scopes. Only hashes are kept: a token has 256 random bits, so one SHA-256 hides it for good."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from specs.errors import InvalidInput, nearest_name

SCOPES = ("read", "plan", "execute")
_PREFIX = "mw_"


@dataclass(frozen=True, slots=True)
class KnownToken:
    """The hash of a token and what it may do."""

    digest: str
    scopes: frozenset[str]

    @classmethod
    def of(cls, token: str, scopes: Iterable[str] = SCOPES) -> KnownToken:
        """The entry of a token in plain text."""
        return cls(_hash(token), frozenset(scopes))

    @classmethod
    def parse(cls, text: str) -> KnownToken:
        """Read ``read,plan:<sha256 hex>``."""
        scopes, _, digest = text.partition(":")
        if len(digest) != 64 or not all(char in "0123456789abcdef" for char in digest):
            raise InvalidInput.single(
                "bad_token_hash", "a token's entry is 'scopes:hash'", loc=("token_hashes",), subject="settings",
                allowed="as 'meshwright token' prints it",
            )  # fmt: skip
        return cls(digest, frozenset(check_scopes(scopes.split(","))))

    def text(self) -> str:
        """The entry for the settings."""
        return f"{','.join(scope for scope in SCOPES if scope in self.scopes)}:{self.digest}"


def check_scopes(scopes: Sequence[str]) -> Sequence[str]:
    """The scopes; raises when one is unknown."""
    for scope in scopes:
        if scope not in SCOPES:
            raise InvalidInput.single(
                "unknown_scope", f"scope '{scope}'", actual=scope, allowed=list(SCOPES), nearest=nearest_name(scope, SCOPES),
                subject="token",
            )  # fmt: skip
    return scopes


def new_token(scopes: Sequence[str]) -> tuple[str, KnownToken]:
    """A random token, shown once, and its entry."""
    token = _PREFIX + secrets.token_urlsafe(32)
    return token, KnownToken.of(token, check_scopes(scopes))


def scopes_of(given: str, known: Iterable[KnownToken]) -> frozenset[str] | None:
    """What the token may do; None when nobody knows it. Takes as long for every token."""
    digest, found = _hash(given), None
    for entry in known:
        if hmac.compare_digest(digest, entry.digest):
            found = entry.scopes
    return found


def scope_needed(method: str, path: str) -> str:
    """``read`` to look, ``execute`` to use the devices here, ``plan`` for everything else."""
    if method in ("GET", "HEAD", "OPTIONS"):
        return "read"
    if path.rstrip("/").endswith("/executions") or path.rstrip("/") == "/v1/profiles":
        return "execute"
    return "plan"


def _hash(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()
