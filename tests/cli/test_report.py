"""`trackbed report`."""

from tests.report.pages import began, check_page, opened, step, write_record


def test_the_page_appears_in_the_folder_of_the_run(run, tmp_path):
    write_record(tmp_path / "first", [opened(), began()], [step(1), step(2)])
    found = run("report", "first")
    size = (tmp_path / "first" / "report.html").stat().st_size
    assert (found.exit_code, found.stdout) == (0, f"first/report.html: {size:,} bytes\n")
    check_page((tmp_path / "first" / "report.html").read_text())


def test_the_page_appears_where_it_is_wanted(run, tmp_path):
    write_record(tmp_path / "first", [opened(), began()], [step(1)])
    assert run("report", "first", "--output", "page.html").exit_code == 0
    check_page((tmp_path / "page.html").read_text())
    assert not (tmp_path / "first" / "report.html").exists()


def test_a_wrong_folder_is_one_line(run, tmp_path):
    (tmp_path / "empty").mkdir()
    found = run("report", "empty")
    assert (found.exit_code, found.stdout) == (1, "")
    assert found.stderr == "trackbed: empty: must be the folder of a run, with events.jsonl, found none\n"
    assert run("report", "gone").exit_code == 2


def test_a_page_that_cannot_be_written_is_one_line(run, tmp_path):
    write_record(tmp_path / "first", [opened(), began()], [step(1)])
    found = run("report", "first", "--output", "gone/page.html")
    assert found.exit_code == 1
    assert found.stderr.startswith("trackbed: gone/page.html")
    assert len(found.stderr.splitlines()) == 1
