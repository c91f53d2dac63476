"""Checks whether the broker's file can be at a path, and whether an existing file is a broker's file."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

from txnbridge.errors import AccessDenied, BackendMissing, InvalidOption, NotFound, StorageFailed, TxnBridgeError
from txnbridge_embedded.client.schema import APPLICATION_ID, VERSION

OLDEST_SQLITE = (3, 35)  # the first version with RETURNING

# File systems that several machines may mount; SQLite's write-ahead log needs memory that all its users share.
_NETWORK = {
    *("nfs", "nfs4", "cifs", "smb3", "smbfs", "ncpfs", "afs", "ceph", "lustre", "glusterfs", "beegfs", "gpfs"),
    *("fuse.sshfs", "fuse.glusterfs", "fuse.ceph", "fuse.s3fs", "fuse.rclone", "fuse.davfs", "davfs"),
}


def check_sqlite(version: tuple[int, ...] = sqlite3.sqlite_version_info) -> None:
    if version < OLDEST_SQLITE:
        text = f"the embedded broker needs SQLite {'.'.join(map(str, OLDEST_SQLITE))}; this Python has "
        raise BackendMissing(text + f"{'.'.join(map(str, version))}: install a newer Python")


def check_path(path: Path, create: bool) -> None:
    """Raise an error if no broker's file can be opened at this path, or, with `create`, created there."""
    try:
        _check_kind(path, create)
    except PermissionError as error:
        raise AccessDenied(f"{path} cannot be reached: this user may not read its folder") from error
    except OSError as error:
        raise InvalidOption(f"{path} cannot be the broker's file: {error.strerror}") from error
    for place, mode in ((path, os.R_OK | os.W_OK), (path.parent, os.R_OK | os.W_OK | os.X_OK)):
        if place.exists() and not os.access(place, mode, effective_ids=os.access in os.supports_effective_ids):
            raise AccessDenied(f"this user may not write {place}; readers write too (their offsets and locks)")
    check_mount(path)


def _check_kind(path: Path, create: bool) -> None:
    if path.is_dir():
        raise InvalidOption(f"{path} is a folder; name a file in it")
    if not path.parent.is_dir():
        raise InvalidOption(f"there is no folder {path.parent} for the broker's file; create it first")
    exists = path.exists()
    if not exists and not create:
        raise NotFound(f"there is no broker's file at {path}; without create=false a bridge creates it")
    if exists and not path.is_file():
        raise InvalidOption(f"{path} is not a plain file")


def check_mount(path: Path, mounts: Path = Path("/proc/self/mountinfo")) -> None:
    """Raise `InvalidOption` for a path on a network mount, if the system lists its mounts."""
    if not mounts.exists():  # macOS and BSD have no such list
        return
    kind, point = mount_of(path.resolve(), mounts.read_text())
    if kind in _NETWORK:
        raise InvalidOption(
            f"{path} is on a network mount ({kind} at {point}), where several machines cannot share SQLite's log "
            "safely; use a disk of this machine"
        )


def mount_of(path: Path, mountinfo: str) -> tuple[str, str]:
    """Return the file system type and the mount point of a path, by the text of /proc/self/mountinfo."""
    best = ("", "")
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        point = _unescape(before.split(" ")[4])
        if path.is_relative_to(point) and len(point) >= len(best[1]):
            best = (after.split(" ")[0], point)
    return best


def _unescape(point: str) -> str:
    for code, character in ((r"\040", " "), (r"\011", "\t"), (r"\012", "\n"), (r"\134", "\\")):
        point = point.replace(code, character)
    return point


def check_header(connection: sqlite3.Connection, path: Path) -> int:
    """Return the file's schema version, 0 if it is empty. Raise `InvalidOption` if it is not a file of this version."""
    # One statement reads one snapshot: another process may be creating the tables at this moment.
    application, version, tables = connection.execute(
        "SELECT application_id, user_version, (SELECT count(*) FROM sqlite_master)"
        " FROM pragma_application_id, pragma_user_version"
    ).fetchone()
    if application == 0 and version == 0 and tables == 0:
        return 0
    if application != APPLICATION_ID:
        raise InvalidOption(f"{path} is a database of another program; name another file")
    if version > VERSION:
        text = f"{path} was written by a newer txnbridge (schema {version}, and this one reads {VERSION}); upgrade"
        raise InvalidOption(text)
    if version < VERSION:
        raise InvalidOption(f"{path} has schema {version}, which no released txnbridge wrote; restore a copy")
    return int(version)


def in_place(path: Path, inode: tuple[int, int]) -> bool:
    """Return whether the file that was opened, with this device and inode number, still is the one at its path."""
    try:
        found = os.stat(path)
    except OSError:
        return False
    return (found.st_dev, found.st_ino) == inode


def moved(path: Path) -> TxnBridgeError:
    return StorageFailed(
        f"{path} was removed, moved or replaced while it was open, so that writes would be lost. Move it back together "
        "with its -wal file, or connect again"
    )
