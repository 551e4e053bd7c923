"""Paths that a declaration of datasets or pairs may name: below a folder, never out of it."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Annotated

from pydantic import AfterValidator


def leads_out(path: str) -> bool:
    """Whether a path, joined to a folder, may lie outside that folder."""
    parts = PurePosixPath(path).parts
    return not parts or PurePosixPath(path).is_absolute() or ".." in parts


def _below(path: str) -> str:
    if leads_out(path):
        raise ValueError("must be a relative path without '..'")
    return path


RelativePath = Annotated[str, AfterValidator(_below)]
