"""`trackbed finish`."""

from pathlib import Path

from trackbed.tokens import verify_content


def interrupt(pair, *, is_bin_renamed):
    """Brings a pair into the state after a kill between two renames."""
    for suffix in (".trackbed.json", ".idx", *(() if is_bin_renamed else (".bin",))):
        Path(pair + suffix).rename(pair + suffix + ".pending")


def test_a_pair_that_a_kill_left_is_completed(run, pair):
    for is_bin_renamed in (False, True):
        interrupt(pair, is_bin_renamed=is_bin_renamed)
        broken = run("inspect", pair)
        assert broken.exit_code == 1
        assert broken.stderr.endswith(
            f"a writer was interrupted while it replaced the pair: run trackbed finish {pair}\n"
        )
        done = run("finish", pair)
        assert (done.exit_code, done.stdout) == (0, f"{pair}: finished\n")
        assert verify_content(pair).documents == 2
    assert run("finish", pair).stdout == f"{pair}: complete already\n"


def test_what_has_no_bin_cannot_be_finished(run, pair):
    interrupt(pair, is_bin_renamed=True)
    Path(pair + ".bin").unlink()
    done = run("finish", pair)
    assert (done.exit_code, done.stdout) == (1, "")
    assert (
        done.stderr
        == f"trackbed: {pair}.idx.pending: its .bin must be in the same folder, found none: write the pair again\n"
    )


def test_where_there_is_no_pair_an_error_says_so(run):
    done = run("finish", "nowhere")
    assert (done.exit_code, done.stderr) == (
        1,
        "trackbed: nowhere: a .bin and an .idx file must exist, missing nowhere.idx and nowhere.bin\n",
    )
