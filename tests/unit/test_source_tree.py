"""A commit, and what lies beside it in the tree."""

import subprocess

import pytest

from harness.source_tree import git_state

NOTHING = (None, None, None)


def git(root, *arguments):
    identity = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
    command = ["git", "-C", str(root), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def tree(tmp_path):
    """A repository with one committed file."""
    git(tmp_path, "init")
    (tmp_path / "file").write_text("1")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "-m", "first")
    return tmp_path


def test_a_repository_without_a_commit(tmp_path):
    git(tmp_path, "init")
    assert git_state(tmp_path) == NOTHING


def test_a_clean_tree(tree):
    assert git_state(tree) == (git(tree, "rev-parse", "HEAD"), False, None)


def test_a_repository_around_the_tree_is_not_ours(tree):
    inside = tree / "site-packages"
    inside.mkdir()
    assert git_state(inside) == NOTHING


def test_two_dirty_trees_are_told_apart(tree):
    clean = git_state(tree)
    sums = []
    for text in ("2", "3", "2"):
        (tree / "file").write_text(text)
        changed = git_state(tree)
        assert (changed.revision, changed.dirty) == (clean.revision, True)
        sums.append(changed.diff_sha256)
    assert sums[0] == sums[2] != sums[1]
    git(tree, "add", "file")  # staged or not is the same tree
    assert git_state(tree).diff_sha256 == sums[0]


def test_a_new_module_makes_a_tree_dirty_and_a_run_directory_does_not(tree):
    (tree / "r").mkdir()
    (tree / "r" / "manifest.json").write_text("{}")
    assert git_state(tree).dirty is False
    module = tree / "harness" / "new.py"
    module.parent.mkdir()
    sums = set()
    for text in ("a = 1", "a = 2"):
        module.write_text(text)
        state = git_state(tree)
        assert state.dirty is True
        sums.add(state.diff_sha256)
    assert len(sums) == 2


def test_git_state_without_git_or_repository(tmp_path, monkeypatch):
    assert git_state(tmp_path) == NOTHING
    monkeypatch.setenv("PATH", "")
    assert git_state(tmp_path) == NOTHING
