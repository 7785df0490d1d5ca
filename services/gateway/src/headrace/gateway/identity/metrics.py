"""What the door counts."""

from __future__ import annotations

from prometheus_client import Counter

REFUSED = Counter("headrace_gateway_credentials_refused_total", "Credentials not accepted, by why.", ("why",))
JWKS_FETCHES = Counter(
    "headrace_gateway_jwks_reads_total", "Readings of issuers' key sets, by outcome.", ("issuer", "outcome")
)
