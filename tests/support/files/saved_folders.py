"""Folders of a few files, of one version each, that are published whole."""

from trackbed.files import commit_folder, flush_files, make_partial_folder

FILES = ("DONE", "a", "inner/b", "inner/deep/c")


def is_ours(folder):
    return (folder / "DONE").is_file()


def fill(folder, version):
    """Writes the files of one version, and returns their paths."""
    paths = [folder / name for name in FILES]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{version} {path.name}")
    return paths


def save(final, version, *, may_replace=is_ours):
    partial = make_partial_folder(final, may_replace=may_replace)
    flush_files(fill(partial, version))
    return commit_folder(partial, final, may_replace=may_replace)
