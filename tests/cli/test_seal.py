from pathlib import Path


def test_an_old_pair_gets_a_seal_that_finds_later_changes(run, pair):
    seal = Path(pair + ".trackbed.json")
    made = seal.read_bytes()
    seal.unlink()
    found = run("seal", pair)
    assert (found.exit_code, found.stdout) == (0, f"{seal}\n")
    assert seal.read_bytes() == made
    assert run("verify", pair, "--content").exit_code == 0


def test_a_damaged_pair_gets_none(run, pair):
    Path(pair + ".trackbed.json").unlink()
    Path(pair + ".bin").write_bytes(b"x")
    found = run("seal", pair)
    assert found.exit_code == 1
    assert found.stderr.startswith(f"trackbed: {pair}.bin: ")
    assert not Path(pair + ".trackbed.json").exists()
