"""The records of engine processes: one JSON file each, so that any later controller finds what this one started."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from headrace.controller.core.fleet import EngineId, Spec
from headrace.observe.log import get_logger

log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRecord:
    """One start of one engine.

    `launch_id` is new for each start and stands in the process's environment. `pid` and `created` (unix seconds, as
    psutil tells it) are None between the decision to start and the word that it did: a controller killed in between
    leaves such a record, and `launch_id` finds the process. `log_offset` is where this start's log begins.
    `last_exit` is how the start before this one ended.
    """

    engine_id: EngineId
    deployment: str
    spec: Spec
    launch_id: str
    starts: int
    failures: int
    last_exit: str
    log_path: str
    log_offset: int
    pid: int | None = None
    created: float | None = None
    stopping: bool = False


class RecordFolder:
    """The records under one folder, each file private to the user and replaced atomically."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._bundles = folder / "bundles"
        for made in (folder, self._bundles):
            made.mkdir(parents=True, exist_ok=True, mode=0o700)

    def read_all(self) -> list[EngineRecord]:
        """All records by engine id. A file that is no record is set aside and logged, once."""
        found = []
        for path in sorted(self._folder.glob("*.json")):
            try:
                found.append(_parse(path.read_bytes()))
            except FileNotFoundError:
                continue
            except (ValueError, TypeError, KeyError) as error:
                aside = path.with_suffix(".unreadable")
                path.replace(aside)
                log.error("engine_record_set_aside", path=str(aside), error=str(error))
        return found

    def read(self, engine_id: EngineId) -> EngineRecord | None:
        """One engine's record."""
        return next((record for record in self.read_all() if record.engine_id == engine_id), None)

    def write(self, record: EngineRecord) -> None:
        """Keep this record, on disk before this returns."""
        self._replace(self._path(record.engine_id), json.dumps(asdict(record), indent=1).encode())

    def remove(self, engine_id: EngineId) -> None:
        """Drop an engine's record, and bundle files that no record needs any more."""
        self._path(engine_id).unlink(missing_ok=True)
        needed = {record.spec.bundle_digest for record in self.read_all()}
        for path in self._bundles.glob("*.json"):
            if path.stem not in needed:
                path.unlink(missing_ok=True)

    def write_bundle(self, digest: str, value: bytes | None) -> Path:
        """The file of a bundle, written if `value` is given; FileNotFoundError when there is neither."""
        path = self._bundles / f"{digest}.json"
        if value is not None:
            self._replace(path, value)
        elif not path.exists():
            raise FileNotFoundError(2, f"bundle {digest} is neither in etcd nor kept here", str(path))
        return path

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold the folder for one change; BlockingIOError while another controller does.

        The election keeps two controllers from acting; this keeps them from doing so on one machine even when one of
        them was frozen in mid-action and wakes up deposed.
        """
        with (self._folder / "lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield

    def _path(self, engine_id: EngineId) -> Path:
        return self._folder / f"{engine_id}.json"

    def _replace(self, path: Path, content: bytes) -> None:
        temporary = path.with_suffix(".new")
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)


def _parse(content: bytes) -> EngineRecord:
    fields: dict[str, Any] = json.loads(content)
    spec = fields.pop("spec")
    settings = tuple((str(name), str(value)) for name, value in spec["settings"])
    pid, created = fields.pop("pid"), fields.pop("created")
    return EngineRecord(
        **fields,
        spec=Spec(bundle_digest=spec["bundle_digest"], backend=spec["backend"], settings=settings),
        pid=None if pid is None else int(pid),
        created=None if created is None else float(created),
    )
