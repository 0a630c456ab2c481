from trackbed.cli.output import describe
from trackbed.errors import FormatError


def test_an_error_of_the_system_says_which_file_first():
    assert describe(PermissionError(13, "Permission denied", "a.idx")) == "a.idx: Permission denied"
    assert describe(OSError(28, "No space left on device")) == "No space left on device"


def test_a_message_of_several_lines_becomes_one():
    assert describe(FormatError("a.json: wrong:\nvery wrong")) == "a.json: wrong: very wrong"


def test_an_error_for_lack_of_memory_is_a_sentence():
    assert describe(MemoryError()) == "this must fit into memory, found too little free"
    assert describe(MemoryError("Unable to allocate")).endswith("found too little free: Unable to allocate")
