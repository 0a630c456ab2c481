import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.files.built_pair import build
from trackbed.errors import ArgumentError
from trackbed.files import partial_name
from trackbed.preprocess.inputs import InputFormat, find_inputs


def names(found):
    return [(file.path.name, file.format.value, file.size_bytes) for file in found.files]


def test_a_folder_stands_for_its_texts_sorted_by_path(tmp_path):
    for name in ("b.txt", "a.jsonl", "c/d.md", "c/e.JSON", "f.bin", "g.py", "noextension"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    found = find_inputs([tmp_path])
    assert found.left_out == 3
    assert names(found) == [("a.jsonl", "jsonl", 1), ("b.txt", "text", 1), ("d.md", "text", 1), ("e.JSON", "jsonl", 1)]


def test_a_seal_in_a_folder_is_no_text(tmp_path):
    (tmp_path / "out_text_document.trackbed.json").write_text("{}")
    (tmp_path / "a.json").write_text("{}")
    assert names(find_inputs([tmp_path])) == [("a.json", "jsonl", 2)]


@pytest.mark.parametrize("name", ["part-00000", "a.jsonl.bak", "a.csv", "a.gz", ".txt", "a.parquet.1"])
def test_a_named_file_of_unknown_suffix_is_refused_with_the_way_on(tmp_path, name):
    (tmp_path / name).write_text("x")
    with pytest.raises(
        ArgumentError, match=r"a file name must end in \.jsonl, .*; --format jsonl\|txt\|parquet states"
    ):
        find_inputs([tmp_path / name])
    (file,) = find_inputs([tmp_path / name], input_format=InputFormat.JSON_LINES).files
    assert file.format is InputFormat.JSON_LINES


def test_with_a_format_a_folder_means_every_file_but_those_of_trackbed(tmp_path):
    for name in ("part-0", "part-1.gz", "b.txt", "x.unfinished/own.txt", "c.bin", "d.idx"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    for name in ("record.json", "lock", "0.bin", "0.lengths"):
        (tmp_path / "x.unfinished" / name).write_text("{}")
    for name in ("out.trackbed.json", "out.bin.pending", "out.idx.lock", partial_name("out.bin")):
        (tmp_path / name).write_text("{}")
    build(tmp_path / "out", [[1, 2]])
    found = find_inputs([tmp_path], input_format=InputFormat.JSON_LINES)
    assert [(file.path.name, file.format.value, file.compression.value) for file in found.files] == [
        ("b.txt", "jsonl", ""),
        ("c.bin", "jsonl", ""),
        ("d.idx", "jsonl", ""),
        ("part-0", "jsonl", ""),
        ("part-1.gz", "jsonl", ".gz"),
        ("own.txt", "jsonl", ""),
    ]
    assert found.left_out == 0


def test_a_compressed_parquet_file_is_refused(tmp_path):
    (tmp_path / "a.parquet.gz").write_text("x")
    with pytest.raises(
        ArgumentError, match=r"a\.parquet\.gz: a Parquet file must not be compressed as a whole, found \.gz"
    ):
        find_inputs([tmp_path / "a.parquet.gz"])


def test_the_work_of_a_run_is_no_input_even_where_it_is_named(tmp_path, caplog):
    (tmp_path / "out.unfinished").mkdir()
    (tmp_path / "out.unfinished" / "record.json").write_text("{}")
    (tmp_path / "a.txt").write_text("x")
    assert names(find_inputs([tmp_path / "a.txt", tmp_path / "out.unfinished"])) == [("a.txt", "text", 1)]
    assert "out.unfinished: skipped, as it holds the work of an unfinished run" in caplog.text
    with pytest.raises(ArgumentError, match="found only the work of unfinished runs"):
        find_inputs([tmp_path / "out.unfinished"])


def test_a_pair_that_is_named_is_no_input(tmp_path):
    build(tmp_path / "out", [[1, 2]])
    for name in ("out.bin", "out.idx", "out.trackbed.json"):
        with pytest.raises(ArgumentError, match="an input must hold texts, found a file of a tokenised pair"):
            find_inputs([tmp_path / name], input_format=InputFormat.PLAIN_TEXT)


def test_inputs_keep_the_order_in_which_they_are_named(tmp_path):
    for name in ("b.txt", "a.txt"):
        (tmp_path / name).write_text("x")
    found = find_inputs([tmp_path / "b.txt", tmp_path / "a.txt", tmp_path / "b.txt"])
    assert [file.path.name for file in found.files] == ["b.txt", "a.txt"]


def test_a_path_without_a_file_is_an_error_that_names_it(tmp_path):
    with pytest.raises(ArgumentError, match=r"gone\.jsonl: an input must be a file or a folder, found nothing"):
        find_inputs([tmp_path / "gone.jsonl"])


def test_a_folder_without_texts_is_an_error(tmp_path):
    (tmp_path / "a.csv").write_text("x")
    with pytest.raises(ArgumentError, match=r"that end in \.jsonl, .*, found 1 other; --format reads files of other"):
        find_inputs([tmp_path])


def test_what_is_neither_a_file_nor_a_folder_is_an_error_and_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.txt")
    for path in (tmp_path, tmp_path / "pipe.txt"):
        with pytest.raises(
            ArgumentError, match=r"pipe\.txt: an input must be a file or a folder, found something else"
        ):
            find_inputs([path])


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("a.jsonl.xz", r"xz data: decompress it \(xz -d\)"),
        ("a.jsonl.bz2", r"bzip2 data: decompress it \(bzip2 -d\)"),
        ("a.txt.lz4", r"LZ4 data: decompress it"),
        ("a.tar.gz", r"a tar archive: unpack it"),
        ("a.tar", r"a tar archive: unpack it"),
        ("a.tar.zst", r"a tar archive: unpack it"),
        ("A.TAR.XZ", r"a tar archive: unpack it"),
        ("a.tgz", r"a tar archive: unpack it"),
        ("a.zip", r"a zip archive: unpack it"),
        ("a.arrow", r"an Arrow file: write it as Parquet"),
    ],
)
def test_a_named_file_of_a_kind_that_is_not_read_says_what_to_do(tmp_path, name, found):
    (tmp_path / name).write_text("x")
    with pytest.raises(ArgumentError, match=rf"{name}: an input must be .*, found the name of {found}"):
        find_inputs([tmp_path / name])
    assert find_inputs([tmp_path / name], input_format=InputFormat.JSON_LINES).files


def skipped(found):
    return [(Path(one.name).name, one.reason.value) for one in found.skipped]


def write(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)


def relative(found, folder):
    return [str(file.path.relative_to(folder)) for file in found.files]


def test_linked_folders_are_followed(tmp_path):
    write(tmp_path, "disk/books/b.jsonl", "disk/books/deep/c.jsonl", "in/a.jsonl")
    (tmp_path / "in" / "books").symlink_to(tmp_path / "disk" / "books")
    assert relative(find_inputs([tmp_path / "in"]), tmp_path / "in") == [
        "a.jsonl",
        "books/b.jsonl",
        "books/deep/c.jsonl",
    ]


def test_a_folder_of_links_only_is_read(tmp_path):
    write(tmp_path, "x/1.jsonl", "y/2.jsonl")
    (tmp_path / "in").mkdir()
    for name in ("x", "y"):
        (tmp_path / "in" / name).symlink_to(f"../{name}")
    (tmp_path / "also").symlink_to("in")
    assert relative(find_inputs([tmp_path / "also"]), tmp_path / "also") == ["x/1.jsonl", "y/2.jsonl"]


def test_links_inside_linked_folders_are_followed_too(tmp_path):
    write(tmp_path, "z/3.jsonl", "y/2.jsonl", "in/1.jsonl")
    (tmp_path / "y" / "z").symlink_to("../z")
    (tmp_path / "in" / "y").symlink_to("../y")
    assert relative(find_inputs([tmp_path / "in"]), tmp_path / "in") == ["1.jsonl", "y/2.jsonl", "y/z/3.jsonl"]


def test_each_real_folder_is_read_once_under_its_own_name(tmp_path):
    write(tmp_path, "v3/b.jsonl")
    (tmp_path / "current").symlink_to("v3")
    found = find_inputs([tmp_path])
    assert relative(found, tmp_path) == ["v3/b.jsonl"]
    assert skipped(found) == [("current", "given twice")]


@pytest.mark.parametrize("target", ["..", ".", "../sub", "/"])
def test_a_loop_of_links_ends(tmp_path, target):
    write(tmp_path, "in/sub/a.jsonl")
    (tmp_path / "in" / "sub" / "up").symlink_to(tmp_path / "in" if target == "/" else target)
    found = find_inputs([tmp_path / "in"])
    assert relative(found, tmp_path / "in") == ["sub/a.jsonl"]
    assert skipped(found) == [("up", "given twice")]


def test_a_folder_of_this_host_is_walked_alike_under_its_address(tmp_path):
    write(tmp_path, "in/a.jsonl", "in/_b.jsonl", "disk/c.jsonl")
    (tmp_path / "in" / "books").symlink_to("../disk")
    (tmp_path / "disk" / "up").symlink_to("../in")
    build(tmp_path / "in" / "out", [[1, 2]])
    by_path, by_address = find_inputs([tmp_path / "in"]), find_inputs([f"file://{tmp_path}/in"])
    assert [file.name for file in by_address.files] == [f"file://{file.name}" for file in by_path.files]
    assert sorted(skipped(by_address)) == sorted(skipped(by_path))
    both = find_inputs([tmp_path / "in", f"file://{tmp_path}/in", f"file://{tmp_path}/disk/c.jsonl"])
    assert both.files == by_path.files
    (tmp_path / "in" / "gone").symlink_to("nowhere")
    with pytest.raises(ArgumentError, match="in/gone: a link must lead to"):
        find_inputs([f"file://{tmp_path}/in"])


def test_two_folders_that_link_to_each_other_are_read_once(tmp_path):
    write(tmp_path, "p/a.jsonl", "q/b.jsonl")
    (tmp_path / "p" / "q").symlink_to("../q")
    (tmp_path / "q" / "p").symlink_to("../p")
    assert relative(find_inputs([tmp_path / "p"]), tmp_path / "p") == ["a.jsonl", "q/b.jsonl"]


def test_a_folder_of_nothing_but_a_loop_is_an_error(tmp_path):
    (tmp_path / "self").symlink_to(".")
    with pytest.raises(ArgumentError, match="found only links to the folders that hold them"):
        find_inputs([tmp_path])


@pytest.mark.parametrize("name", ["gone.jsonl", "gone", "gone.unknown"])
@pytest.mark.parametrize("target", ["nowhere", "a.jsonl/below", "SELF"])
def test_a_link_to_nothing_is_an_error_that_names_it(tmp_path, name, target):
    write(tmp_path, "a.jsonl")
    (tmp_path / name).symlink_to(name if target == "SELF" else target)
    found = name if target == "SELF" else target
    for given_path in (tmp_path, tmp_path / name):
        with pytest.raises(
            ArgumentError, match=rf"{name}: a link must lead to a file or a folder, found none at {found}"
        ):
            find_inputs([given_path])


def test_a_hidden_link_to_nothing_is_left_out(tmp_path):
    write(tmp_path, "a.jsonl")
    (tmp_path / ".#a.jsonl").symlink_to("user@host.1234")  # an editor's lock
    assert skipped(find_inputs([tmp_path])) == [(".#a.jsonl", "hidden")]


def test_names_with_a_dot_or_an_underscore_in_front_are_left_out_below_a_folder(tmp_path):
    write(
        tmp_path,
        "part-0.jsonl",
        ".ipynb_checkpoints/part-0-checkpoint.jsonl",
        ".part-1.jsonl",
        "._part-0.jsonl",
        "_temporary/0/part-2.jsonl",
        "_SUCCESS",
        "deep/_metadata.json",
        "deep/b.jsonl",
    )
    for input_format in (None, InputFormat.JSON_LINES):
        found = find_inputs([tmp_path], input_format=input_format)
        assert relative(found, tmp_path) == ["deep/b.jsonl", "part-0.jsonl"]
        assert sorted(skipped(found)) == [
            (name, "hidden")
            for name in (
                "._part-0.jsonl",
                ".ipynb_checkpoints",
                ".part-1.jsonl",
                "_SUCCESS",
                "_metadata.json",
                "_temporary",
            )
        ]


def test_hidden_names_that_are_given_are_read(tmp_path):
    write(tmp_path, "_in/a.jsonl", "_in/_b.jsonl", ".c.jsonl")
    (tmp_path / ".linked").symlink_to("_in")
    found = find_inputs([tmp_path / "_in", tmp_path / ".c.jsonl", tmp_path / "_in" / "_b.jsonl"])
    assert relative(found, tmp_path) == ["_in/a.jsonl", ".c.jsonl", "_in/_b.jsonl"]
    assert relative(find_inputs([tmp_path / ".linked"]), tmp_path) == [".linked/a.jsonl"]


def test_a_linked_folder_counts_by_the_name_of_the_link(tmp_path):
    write(tmp_path, "_disk/a.jsonl", "in/b.jsonl")
    (tmp_path / "in" / "books").symlink_to("../_disk")
    (tmp_path / "in" / "_books").symlink_to("../_disk")
    assert relative(find_inputs([tmp_path / "in"]), tmp_path / "in") == ["b.jsonl", "books/a.jsonl"]


def test_a_folder_of_hidden_names_only_says_so(tmp_path):
    write(tmp_path, ".a.jsonl", "_b/c.jsonl")
    with pytest.raises(
        ArgumentError, match=r"found 2 hidden, whose names begin with \. or _; hidden ones are read where"
    ):
        find_inputs([tmp_path])


@pytest.mark.parametrize("link", ["symbolic", "hard", "same name", "spelling", "folder", "folder first"])
def test_a_file_under_two_names_is_read_once(tmp_path, link):
    write(tmp_path, "in/a.jsonl", "in/b.jsonl")
    path = tmp_path / "in" / "a.jsonl"
    twice = {
        "symbolic": [path, tmp_path / "link.jsonl"],
        "hard": [path, tmp_path / "hard.jsonl"],
        "same name": [path, path],
        "spelling": [path, Path(f"{tmp_path}/in/../in//a.jsonl")],
        "folder": [path, tmp_path / "in"],
        "folder first": [tmp_path / "in", path],
    }[link]
    (tmp_path / "link.jsonl").symlink_to(path)
    (tmp_path / "hard.jsonl").hardlink_to(path)
    found = find_inputs(twice)
    assert [file.path.name for file in found.files] == ["a.jsonl", "b.jsonl"][: 1 + ("folder" in link)]
    assert [reason for _, reason in skipped(found)] == ["given twice"]


def test_a_folder_given_twice_or_with_its_part_is_read_once(tmp_path):
    write(tmp_path, "in/a.jsonl", "in/sub/b.jsonl")
    folder = tmp_path / "in"
    assert relative(find_inputs([folder, folder]), folder) == ["a.jsonl", "sub/b.jsonl"]
    assert relative(find_inputs([folder / "sub", folder]), folder) == ["sub/b.jsonl", "a.jsonl"]
    assert relative(find_inputs([folder, folder / "sub"]), folder) == ["a.jsonl", "sub/b.jsonl"]


def test_equal_files_are_two_files(tmp_path):
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text("{}")
        os.utime(tmp_path / name, ns=(5, 5))
    assert len(find_inputs([tmp_path]).files) == 2


def test_what_trackbed_wrote_into_a_folder_is_told(tmp_path):
    build(tmp_path / "out", [[1, 2]])
    write(tmp_path, "a.jsonl")
    assert sorted(skipped(find_inputs([tmp_path]))) == [
        ("out.bin", "written by trackbed"),
        ("out.idx", "written by trackbed"),
        ("out.trackbed.json", "written by trackbed"),
    ]


POINTER = (
    "version https://git-lfs.github.com/spec/v1\n"
    "oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\n"
    "size 12345\n"
)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.txt", "a.parquet"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_pointer_of_git_lfs_is_an_error_that_says_what_to_do(tmp_path, name, end):
    (tmp_path / name).write_text(POINTER.replace("\n", end), newline="")
    for given_path in (tmp_path, tmp_path / name):
        with pytest.raises(ArgumentError, match=rf"{name}: an input must hold its content, found the .*`git lfs pull`"):
            find_inputs([given_path])


def test_a_pointer_of_git_annex_is_an_error_too(tmp_path):
    (tmp_path / "a.jsonl").write_text(f"/annex/objects/SHA256E-s31390--{'f4' * 32}.jsonl\n")
    with pytest.raises(ArgumentError, match="`git annex get`"):
        find_inputs([tmp_path])


def test_a_text_about_pointers_is_a_text(tmp_path):
    (tmp_path / "a.txt").write_text(f"A pointer looks like this:\n{POINTER}")
    (tmp_path / "b.txt").write_text(POINTER.partition("\n")[0] + " is its first line, and an oid its second one\n")
    assert len(find_inputs([tmp_path]).files) == 2


@pytest.mark.parametrize("records", ["a.jsonl", "a.json", "a.jsonl.gz"])
def test_plain_texts_beside_records_are_named(tmp_path, records, caplog):
    write(tmp_path, records, "b/README.md", "LICENSE.txt")
    found = find_inputs([tmp_path])
    assert "has 2 plain texts beside 1 file of JSON lines, and each becomes a document" in caplog.text
    assert "LICENSE.txt" in caplog.text
    assert "README.md" in caplog.text
    assert {name: len(names) for name, names in found.names_by_format().items()} == {"text": 2, "jsonl": 1}


def test_texts_alone_and_files_that_are_named_are_no_mixture(tmp_path, caplog):
    write(tmp_path, "a/1.md", "a/2.txt", "b/3.jsonl")
    find_inputs([tmp_path / "a", tmp_path / "b"])
    find_inputs([tmp_path / "a" / "1.md", tmp_path / "b" / "3.jsonl"])
    assert caplog.text == ""


@settings(max_examples=60, deadline=None)
@given(
    files=st.lists(st.sampled_from(["a.jsonl", "p/b.jsonl", "q/c.jsonl", "p/s/d.jsonl", "q/t/e.jsonl"]), min_size=1),
    links=st.lists(
        st.tuples(
            st.sampled_from(["", "p/", "q/", "p/s/"]), st.sampled_from("klm"), st.sampled_from(["", "p", "q", "p/s"])
        )
    ),
)
def test_however_folders_are_linked_each_file_is_read_once_in_a_fixed_order(files, links):
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        for folder in ("p/s", "q/t"):
            (root / folder).mkdir(parents=True)
        write(root, *files)
        for where, link, target in links:
            path = root / f"{where}{link}"
            if not path.is_symlink():
                path.symlink_to(root / target)
        found = [file.path for file in find_inputs([root]).files]
        assert sorted(str(path.resolve().relative_to(root.resolve())) for path in found) == sorted(set(files))
        assert found == sorted(found)
        assert [file.path for file in find_inputs([root]).files] == found
