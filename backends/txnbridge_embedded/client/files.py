"""Checks whether a broker's file can be at a path, and whether an existing file is one of this broker."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

from txnbridge.errors import AccessDenied, BackendMissing, InvalidOption, NotFound, StorageFailed, TxnBridgeError
from txnbridge_embedded.client.schema import APPLICATION_ID, OLDEST, VERSION

OLDEST_SQLITE = (3, 35)  # the first version with RETURNING

# File systems that several machines may mount; SQLite's write-ahead log needs memory that all its users share.
_NETWORK = {
    *("nfs", "nfs4", "cifs", "smb3", "smbfs", "ncpfs", "afs", "ceph", "lustre", "glusterfs", "beegfs", "gpfs"),
    *("fuse.sshfs", "fuse.glusterfs", "fuse.ceph", "fuse.s3fs", "fuse.rclone", "fuse.davfs", "davfs"),
}


def check_sqlite(version: tuple[int, ...] = sqlite3.sqlite_version_info) -> None:
    """Raise `BackendMissing` for a version of SQLite that is too old."""
    if version < OLDEST_SQLITE:
        raise BackendMissing(
            f"the embedded broker needs SQLite {'.'.join(map(str, OLDEST_SQLITE))}; this Python has "
            f"{'.'.join(map(str, version))}: install a newer Python"
        )


def check_path(path: Path, create: bool) -> None:
    """Raise the most exact error if no broker's file can be opened, or with `create` created, at this path."""
    try:
        _check_kind(path, create)
    except PermissionError as error:
        raise AccessDenied(f"{path} cannot be reached: this user may not look into its folder") from error
    except OSError as error:
        raise InvalidOption(f"{path} cannot be the broker's file: {error.strerror}") from error
    for place, mode in ((path, os.R_OK | os.W_OK), (path.parent, os.R_OK | os.W_OK | os.X_OK)):
        if place.exists() and not os.access(place, mode, effective_ids=os.access in os.supports_effective_ids):
            raise AccessDenied(f"{place} may not be written by this user; readers write too (their positions, locks)")
    check_mount(path)


def _check_kind(path: Path, create: bool) -> None:
    if path.is_dir():
        raise InvalidOption(f"{path} is a folder; name a file in it")
    if not path.parent.is_dir():
        raise InvalidOption(f"there is no folder {path.parent} for the broker's file; create it first")
    exists = path.exists()
    if not exists and not create:
        raise NotFound(f"there is no broker's file at {path}; a bridge that writes makes it, unless with create=false")
    if exists and not path.is_file():
        raise InvalidOption(f"{path} is not a plain file")


def check_mount(path: Path, mounts: Path = Path("/proc/self/mountinfo")) -> None:
    """Raise `InvalidOption` for a path on a network mount, if the system lists its mounts."""
    if not mounts.exists():  # macOS and BSD have no such list
        return
    kind, point = mount_of(path.resolve(), mounts.read_text())
    if kind in _NETWORK:
        raise InvalidOption(
            f"{path} is on a network mount ({kind} at {point}), where processes of several machines cannot share "
            "SQLite's log safely; use a disk of this machine"
        )


def mount_of(path: Path, mountinfo: str) -> tuple[str, str]:
    """Return the file system type and the mount point of a path; of two mounts at one point the later counts."""
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
    """Return the schema version of the file; 0 for an empty file.

    Raise `InvalidOption` for a file of another program, of a newer version, or of a version that never existed.
    """
    # One statement reads one snapshot, because another process may be creating the tables right now.
    application, version, tables = connection.execute(
        "SELECT application_id, user_version, (SELECT count(*) FROM sqlite_master)"
        " FROM pragma_application_id, pragma_user_version"
    ).fetchone()
    if application == 0 and version == 0 and tables == 0:
        return 0
    if application != APPLICATION_ID:
        raise InvalidOption(f"{path} is a database of another program; name another file")
    if version > VERSION:
        raise InvalidOption(
            f"{path} was written by a newer txnbridge (its version is {version}, this one reads {VERSION}); upgrade"
        )
    if version < OLDEST:
        raise InvalidOption(f"{path} has version {version}, which no released txnbridge wrote; restore a copy")
    return int(version)


def in_place(path: Path, inode: tuple[int, int]) -> bool:
    """Return whether the file that was opened is still the one at this path."""
    try:
        found = os.stat(path)
    except OSError:
        return False
    return (found.st_dev, found.st_ino) == inode


def moved(path: Path) -> TxnBridgeError:
    return StorageFailed(
        f"{path} was removed, moved or replaced while it was open; what is written now would be lost. "
        "Put it back together with its -wal file, or open it anew"
    )
