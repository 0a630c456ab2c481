from trackbed.cli.messages import describe
from trackbed.errors import FormatError


def test_an_error_of_the_system_says_which_file_first():
    assert describe(PermissionError(13, "Permission denied", "a.idx")) == "a.idx: Permission denied"
    assert describe(OSError(28, "No space left on device")) == "No space left on device"


def test_a_message_of_several_lines_becomes_one():
    assert describe(FormatError("a.json: wrong:\nvery wrong")) == "a.json: wrong: very wrong"


def test_what_does_not_fit_into_memory_is_told_in_a_sentence():
    assert describe(MemoryError()) == "this must fit into memory, found too little of it"
    assert describe(MemoryError("Unable to allocate")).endswith("found too little of it: Unable to allocate")
