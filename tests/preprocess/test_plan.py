from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from trackbed.preprocess import chunks
from trackbed.preprocess.inputs import InputFile, InputFormat


def file(name, size_bytes, input_format=InputFormat.JSON_LINES):
    return InputFile(Path(name), input_format, size_bytes)


def plan_chunks(files, *, chunk_bytes):
    return chunks.plan_chunks(files, chunk_bytes=chunk_bytes, max_record_bytes=1 << 30)


def spans(chunks):
    return [[(segment.file.path.name, segment.start, segment.stop) for segment in chunk.segments] for chunk in chunks]


def test_a_large_file_is_cut_and_small_ones_go_together():
    files = [file("a", 25), file("b", 3), file("c", 4), file("d", 4)]
    assert spans(plan_chunks(files, chunk_bytes=10)) == [
        [("a", 0, 10)],
        [("a", 10, 20)],
        [("a", 20, 25), ("b", 0, 3)],
        [("c", 0, 4), ("d", 0, 4)],
    ]


def test_a_plain_text_is_never_cut_and_an_empty_one_is_a_document_too():
    files = [file("a", 25, InputFormat.PLAIN_TEXT), file("b", 0, InputFormat.PLAIN_TEXT)]
    assert spans(plan_chunks(files, chunk_bytes=10)) == [[("a", 0, 25)], [("b", 0, 0)]]


def test_empty_files_of_lines_and_no_files_make_no_chunks():
    assert list(plan_chunks([file("a", 0)], chunk_bytes=10)) == []
    assert list(plan_chunks([], chunk_bytes=10)) == []


@given(
    sizes=st.lists(
        st.tuples(st.integers(0, 50), st.sampled_from([InputFormat.JSON_LINES, InputFormat.PLAIN_TEXT])), max_size=8
    ),
    chunk_bytes=st.integers(1, 60),
)
def test_chunks_cover_every_byte_once_and_in_order(sizes, chunk_bytes):
    files = [file(str(number), size, input_format) for number, (size, input_format) in enumerate(sizes)]
    segments = [segment for chunk in plan_chunks(files, chunk_bytes=chunk_bytes) for segment in chunk.segments]
    for one in files:
        mine = [segment for segment in segments if segment.file is one]
        assert [at for segment in mine for at in range(segment.start, segment.stop)] == list(range(one.size_bytes))
    assert [segment.file for segment in segments] == sorted((segment.file for segment in segments), key=files.index)


@given(sizes=st.lists(st.integers(0, 50), max_size=8), chunk_bytes=st.integers(1, 60))
def test_no_chunk_of_lines_is_larger_than_asked_for(sizes, chunk_bytes):
    files = [file(str(number), size) for number, size in enumerate(sizes)]
    assert all(chunk.size_bytes <= chunk_bytes for chunk in plan_chunks(files, chunk_bytes=chunk_bytes))


def test_a_chunk_says_where_it_is():
    one, two = plan_chunks([file("a", 10), file("b", 3), file("c", 2)], chunk_bytes=10)
    assert str(one) == "a: bytes [0, 10)"
    assert str(two) == "b to c (2 segments)"
