"""Which source a run was made from: the commit, and what the tree has beside it."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path
from typing import NamedTuple

# Where a file that git does not know can change a run; elsewhere it may be the run's own output.
_PACKAGES = ("harness", "impl", "baselines", "datasets")


class GitState(NamedTuple):
    """Commit of the source tree and its changes; all None outside a repository.

    Attributes:
        revision: the commit.
        dirty: tracked files were changed, or the packages have files that git does not know.
        diff_sha256: of these changes, to tell two dirty trees apart; None in a clean tree.
    """

    revision: str | None
    dirty: bool | None
    diff_sha256: str | None


def git_state(root: Path) -> GitState:
    """State of the repository whose top folder is `root`; a repository around it is not ours."""
    found = _git(root, "rev-parse", "--show-toplevel", "HEAD")
    if found is None:
        return GitState(None, None, None)
    top, revision = found.decode().splitlines()
    if Path(top).resolve() != root.resolve():
        return GitState(None, None, None)
    changes = _git(root, "diff", "--binary", "--no-ext-diff", "--no-textconv", "HEAD")
    unknown = _git(root, "ls-files", "--others", "--exclude-standard", "-z", "--", *_PACKAGES)
    if changes is None or unknown is None:
        return GitState(revision, None, None)
    if not changes and not unknown:
        return GitState(revision, False, None)
    return GitState(revision, True, _sum(root, changes, unknown.decode().split("\0")[:-1]))


def _sum(root: Path, changes: bytes, unknown: list[str]) -> str:
    """SHA-256 of the changes and of the files that git does not know, each with its name."""
    total = hashlib.sha256(changes)
    for name in sorted(unknown):
        file = root / name
        content = file.read_bytes() if file.is_file() else b""
        total.update(f"{name}\0{hashlib.sha256(content).hexdigest()}\0".encode())
    return total.hexdigest()


def _git(root: Path, *arguments: str) -> bytes | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, check=False
        )
    except OSError:  # git is not installed
        return None
    return done.stdout if done.returncode == 0 else None
