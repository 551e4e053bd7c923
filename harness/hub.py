"""The Hugging Face hub: its cache on this machine first, then the hub, giving up in seconds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from harness.errors import HubError
from harness.messages import first_line

_TIMEOUT_S = 5.0

RepoType = Literal["model", "dataset"]


def fetch(
    repo: str,
    revision: str,
    get: Callable[..., Any],
    *,
    repo_type: RepoType = "model",
    offline: bool = False,
    tqdm_class: type[Any] | None = None,
) -> Path:
    """What `get` fetches, from the hub's cache or the hub.

    Args:
        repo: `owner/name`.
        revision: a commit, branch or tag; a branch is resolved to its commit before the download.
        get: `hf_hub_download` or `snapshot_download` with all but the revision filled in.
        repo_type: of the repository.
        offline: use the hub's cache and nothing else.
        tqdm_class: is told the progress of a download.

    Raises:
        HubError: not in the cache and offline, unreachable, absent, or gated.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )
    from huggingface_hub.utils import httpx  # type: ignore[attr-defined]  # httpx or httpx2

    try:
        return Path(get(revision=revision, local_files_only=True))
    except LocalEntryNotFoundError:
        if offline:
            raise HubError("not in the hub's cache, and offline") from None
    ask = HfApi().model_info if repo_type == "model" else HfApi().dataset_info
    try:
        # Asked first because it fails at once where a download retries for half a minute.
        commit = ask(repo, revision=revision, timeout=_TIMEOUT_S).sha
        return Path(get(revision=commit, **({"tqdm_class": tqdm_class} if tqdm_class else {})))
    except GatedRepoError as error:
        raise HubError(f"gated: {how_to_get(repo, repo_type)}") from error
    except RepositoryNotFoundError as error:
        hint = f"if it is private or gated, {how_to_get(repo, repo_type)}"
        raise HubError(f"no such repository for you; {hint}") from error
    except (httpx.HTTPError, OSError) as error:
        raise HubError(first_line(error)) from error


def how_to_get(repo: str, repo_type: RepoType = "model") -> str:
    """What a person has to do for a gated repository."""
    kind = "datasets/" if repo_type == "dataset" else ""
    url = f"https://huggingface.co/{kind}{repo}"
    return f"accept the licence at {url} and set HF_TOKEN to a token of your account"
