"""The gRPC options of every channel and server, as data: the one place where they are decided."""

from __future__ import annotations

from dataclasses import dataclass

Options = list[tuple[str, int | str]]

_MOST_PENDING = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Keepalive:
    """How fast a dead or frozen peer is noticed: after about `time_s` + `timeout_s`."""

    time_s: float = 1.0
    timeout_s: float = 1.0


def channel_options(keepalive: Keepalive, *, max_message_bytes: int = 16 << 20) -> Options:
    """Options of a client channel to one peer."""
    return [
        *_keepalive_options(keepalive),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        # The default of up to 120 s between reconnects is for the internet, not for a fleet's own network.
        ("grpc.initial_reconnect_backoff_ms", 100),
        # How long one attempt may take: on a machine under full load a handshake can need more than a second.
        ("grpc.min_reconnect_backoff_ms", 5000),
        ("grpc.max_reconnect_backoff_ms", 2000),
        # A slow reader must not let the window grow to megabytes: with the probe off it stays near 64 kB.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.enable_http_proxy", 0),
    ]


def server_options(keepalive: Keepalive, *, max_message_bytes: int = 16 << 20) -> Options:
    """Options of a server."""
    return [
        *_keepalive_options(keepalive),
        # Pings at `time_s` would otherwise be answered with GOAWAY too_many_pings (default: one per 5 minutes).
        ("grpc.http2.min_ping_interval_without_data_ms", 300),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 300),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        # Calls that the process has not taken up yet, because it is busy with those that came before. By default every
        # further one beyond 1000 is cancelled at random, without a word: 1,500 clients that come back at once would be.
        ("grpc.server.max_pending_requests", _MOST_PENDING),
        ("grpc.server.max_pending_requests_hard_limit", _MOST_PENDING),
        # Two servers sharing a port by accident would hide a fault; a taken port must be an error.
        ("grpc.so_reuseport", 0),
        ("grpc.http2.bdp_probe", 0),
    ]


def _keepalive_options(keepalive: Keepalive) -> Options:
    return [
        ("grpc.keepalive_time_ms", int(keepalive.time_s * 1000)),
        ("grpc.keepalive_timeout_ms", int(keepalive.timeout_s * 1000)),
        # Without this one C-core waits 60 s for the ping's answer, whatever keepalive_timeout_ms says (ADR 0005).
        ("grpc.http2.ping_timeout_ms", int(keepalive.timeout_s * 1000)),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.keepalive_permit_without_calls", 1),
    ]
