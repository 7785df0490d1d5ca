"""Where intent lives in etcd."""

from __future__ import annotations

ROOT = "/headrace/v1/"
BUNDLES = ROOT + "bundles/"
DEPLOYMENTS = ROOT + "deployments/"
API_KEYS = ROOT + "keys/"
TENANTS = ROOT + "tenants/"
ISSUERS = ROOT + "issuers/"
LEADERS = ROOT + "leader/"


def bundle_key(digest: str) -> str:
    """The key of the bundle with this digest."""
    return BUNDLES + digest


def deployment_key(name: str) -> str:
    """The key of the deployment of this name."""
    return DEPLOYMENTS + name


def api_key_key(key_hash: str) -> str:
    """The key of an API key's record; `key_hash` is from `intent.hash_api_key`."""
    return API_KEYS + key_hash


def tenant_key(name: str) -> str:
    """The key of the tenant of this name."""
    return TENANTS + name


def issuer_key(name: str) -> str:
    """The key of the token issuer of this name."""
    return ISSUERS + name


def leader_key(role: str) -> str:
    """The prefix under which candidates for `role` stand for election."""
    return LEADERS + role + "/"


def name_in(key: str, prefix: str) -> str:
    """What follows `prefix` in `key`: the digest, deployment name or key hash."""
    return key.removeprefix(prefix)
