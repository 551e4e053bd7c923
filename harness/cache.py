"""The cache folder, and the checksums that unpinned files had when they were first used."""

from __future__ import annotations

import json
import os
from pathlib import Path


def default_cache_dir(override: Path | None = None) -> Path:
    """Where fetched files are kept; `override` is what the command line was told."""
    return override or Path.home() / ".cache" / "saguaro-harness"


class FirstUse:
    """Trust on first use: the sum of an unpinned file is recorded once and must not change.

    The record is `first-use.json` in the cache folder, a mapping from what a file is called to its
    SHA-256; deleting an entry trusts the next version.
    """

    def __init__(self, cache_dir: Path) -> None:
        self.path = cache_dir / "first-use.json"

    def expected(self, name: str) -> str | None:
        """The sum that `name` had at its first use; None when it was never used."""
        return self._read().get(name)

    def record(self, name: str, sha256: str) -> None:
        """Keeps the sum of a first use; a sum that is there already stays."""
        from filelock import FileLock

        self.path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(self.path.with_suffix(".lock")):
            known = {name: sha256, **self._read()}
            unfinished = self.path.with_name(f"{self.path.name}.{os.getpid()}")
            unfinished.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n", "utf-8")
            unfinished.replace(self.path)

    def _read(self) -> dict[str, str]:
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}  # absent or damaged: every file is at its first use again
        return {str(k): str(v) for k, v in content.items()} if isinstance(content, dict) else {}
