"""The one error for every credential that is not accepted."""

from __future__ import annotations

from headrace.base.errors import Unauthenticated
from headrace.gateway.core.refusal import Refusal


class CredentialRefused(Unauthenticated):
    """The client hears the same whatever the reason, or it could find out which keys exist.

    `refusal` and `credential` (the key's or issuer's name, as far as known) are for audit; they are never sent.
    """

    def __init__(self, refusal: Refusal, credential: str = "") -> None:
        if refusal is Refusal.NO_CREDENTIAL:
            super().__init__("send your API key or token as `authorization: Bearer …`", reason="NO_CREDENTIAL")
        else:
            super().__init__("this API key or token is not accepted")
        self.refusal = refusal
        self.credential = credential
