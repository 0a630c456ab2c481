from pathlib import Path


def test_a_valid_pair_is_reported(run, pair):
    for options in ([], ["--content"]):
        found = run("verify", pair, *options)
        assert found.exit_code == 0
        assert found.stdout == f"{pair}: ok: documents 2, sequences 2, tokens 5 of uint16\n"


def test_a_changed_byte_is_found_by_content_only(run, pair):
    path = Path(pair + ".bin")
    path.write_bytes(b"X" + path.read_bytes()[1:])
    assert run("verify", pair).exit_code == 0
    found = run("verify", pair, "--content")
    assert (found.exit_code, found.stdout) == (1, "")
    assert found.stderr.startswith(f"trackbed: {pair}.bin: the seal says CRC-32 ")


def test_each_pair_is_checked_even_if_others_are_damaged(run, pair):
    Path("half.idx").write_bytes(b"")
    found = run("verify", "gone", ".")
    assert found.exit_code == 1
    assert found.stdout.startswith(f"{pair}: ok")
    assert found.stderr.splitlines() == [
        "trackbed: gone: a .bin and an .idx file must exist, missing gone.idx and gone.bin",
        "trackbed: half: a .bin and an .idx file must exist, missing half.bin",
    ]


def test_a_pair_without_a_seal_says_how_to_make_one(run, pair):
    Path(pair + ".trackbed.json").unlink()
    found = run("verify", pair, "--content")
    assert found.exit_code == 1
    assert found.stderr == (
        f"trackbed: {pair}.trackbed.json: No such file or directory; "
        f"`trackbed seal {pair}` creates one for the current files\n"
    )
