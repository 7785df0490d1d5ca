"""Guards and operations of a transaction."""

from __future__ import annotations

from headrace.coord.etcd.v3 import etcd_pb2 as pb


def created_at(key: str, revision: int) -> pb.Compare:
    """The key was created at `revision`; 0: it does not exist."""
    return pb.Compare(
        key=key.encode(),
        result=pb.COMPARE_RESULT_EQUAL_UNSPECIFIED,
        target=pb.COMPARE_TARGET_CREATE,
        create_revision=revision,
    )


def unchanged_since(key: str, revision: int) -> pb.Compare:
    """The key's last change was at `revision`; 0: it does not exist."""
    return pb.Compare(
        key=key.encode(),
        result=pb.COMPARE_RESULT_EQUAL_UNSPECIFIED,
        target=pb.COMPARE_TARGET_MOD,
        mod_revision=revision,
    )


def put_op(key: str, value: bytes, lease: int = 0) -> pb.RequestOp:
    """Write the key."""
    return pb.RequestOp(request_put=pb.PutRequest(key=key.encode(), value=value, lease=lease))


def delete_op(key: str) -> pb.RequestOp:
    """Delete the key; nothing happens when it is not there."""
    return pb.RequestOp(request_delete_range=pb.DeleteRangeRequest(key=key.encode()))
