from pathlib import Path

import numpy as np

from trackbed.tokens import IndexedDataset


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


def test_a_folder_in_the_place_of_a_mask_is_refused(run, pair):
    before = Path(pair + ".trackbed.json").read_bytes()
    Path(pair + ".mask").mkdir()
    assert ".mask: the seal of the pair must name it" in run("verify", pair).stderr
    found = run("seal", pair)
    assert (found.exit_code, found.stderr) == (
        1,
        f"trackbed: {pair}.mask: must be a file, found something else: remove it\n",
    )
    assert Path(pair + ".trackbed.json").read_bytes() == before


def test_a_mask_of_several_arrays_is_refused(run, pair, tmp_path):
    np.savez(tmp_path / "mask.npz", np.ones(5, dtype=bool))
    (tmp_path / "mask.npz").rename(tmp_path / "mask.npy")
    assert "must be one array, found an archive" in run("seal", pair, "--mask", str(tmp_path / "mask.npy")).stderr


def test_a_mask_that_is_lost_is_told_and_no_longer_named(run, pair, tmp_path):
    size = Path(pair + ".bin").stat().st_size // IndexedDataset(pair).index.dtype_size
    (tmp_path / "mask.lsm").write_bytes(bytes(size))
    assert run("seal", pair, "--mask", str(tmp_path / "mask.lsm")).exit_code == 0
    Path(pair + ".trackbed.json").unlink()
    assert "the seal of the pair must name it" in run("verify", pair).stderr
    assert run("seal", pair).exit_code == 0
    assert run("verify", pair).exit_code == 0
    Path(pair + ".mask").unlink()
    assert "the seal says" in run("verify", pair).stderr
    found = run("seal", pair)
    assert (found.exit_code, found.stderr) == (
        0,
        f"trackbed: {pair}.mask: the old seal names it, found none: all tokens are trained now\n",
    )
    assert run("verify", pair).exit_code == 0
