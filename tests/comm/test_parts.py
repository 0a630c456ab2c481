"""Tests of the pure parts: messages, silence timer, launchers' variables."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trackbed.comm.difference import describe_difference
from trackbed.comm.launch import Launch, first_host, group_from_environment, parse_launch
from trackbed.comm.outcomes import RankFailure, describe_failures, name_ranks
from trackbed.comm.watchdog import SilenceTimer
from trackbed.errors import ArgumentError

TORCHRUN = {"RANK": "2", "WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "29500"}
SRUN = {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "8", "SLURM_NODELIST": "gpu[012-015]", "SLURM_JOB_ID": "4711"}


def test_torchruns_variables_give_rank_and_address():
    assert parse_launch(TORCHRUN) == Launch(rank=2, size=4, host="10.0.0.7", port=29500)


def test_sruns_variables_give_rank_and_address():
    assert parse_launch(SRUN) == Launch(rank=3, size=8, host="gpu012", port=14711)


def test_an_address_of_the_user_takes_precedence_over_slurm():
    launch = parse_launch({**SRUN, "MASTER_ADDR": "head", "MASTER_PORT": "77"})
    assert (launch.host, launch.port) == ("head", 77)


def test_a_step_on_some_of_the_hosts_uses_its_own_first_host():
    assert parse_launch({**SRUN, "SLURM_STEP_NODELIST": "gpu014"}).host == "gpu014"


def test_steps_of_one_job_use_different_ports():
    ports = {parse_launch({**SRUN, "SLURM_STEP_ID": str(step)}).port for step in range(1000)}
    assert len(ports) == 1000
    assert all(10_000 <= port < 30_000 for port in ports)


@pytest.mark.parametrize(
    ("environment", "host"),
    [
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "4"}, "127.0.0.1"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "2"}, "10.0.0.7"),
        ({**SRUN, "SLURM_STEP_NUM_NODES": "1", "SLURM_NNODES": "4"}, "127.0.0.1"),
        ({**SRUN, "SLURM_NNODES": "4"}, "gpu012"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "4", "TORCHELASTIC_USE_AGENT_STORE": "True"}, "10.0.0.7"),
    ],
)
def test_ranks_of_one_host_use_its_loopback_address(environment, host):
    assert parse_launch(environment).host == host


def test_torchruns_variables_take_precedence_over_slurms():
    assert parse_launch({**SRUN, **TORCHRUN}).size == 4


def test_without_a_launcher_there_is_one_rank(monkeypatch):
    for name in {*TORCHRUN, *SRUN}:
        monkeypatch.delenv(name, raising=False)
    assert parse_launch({}) is None
    assert group_from_environment().size == 1


def test_a_command_of_a_batch_script_without_srun_is_the_only_rank():
    job = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_NODELIST": "gpu[012-015]", "SLURM_JOB_ID": "4711"}
    assert parse_launch(job) is None
    assert parse_launch({**job, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"}).size == 1


def test_one_rank_needs_no_address():
    assert parse_launch({"RANK": "0", "WORLD_SIZE": "1"}).size == 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"RANK": "4"}, r"RANK must be an integer in \[0, 4\), but is '4'"),
        ({"RANK": "-1"}, r"RANK must be an integer in \[0, 4\), but is '-1'"),
        ({"WORLD_SIZE": "many"}, r"WORLD_SIZE must be an integer in \[1, 2147483648\), but is 'many'"),
        ({"WORLD_SIZE": None}, r"WORLD_SIZE must be an integer in \[1, 2147483648\), but is ''"),
        ({"MASTER_PORT": "65536"}, r"MASTER_PORT must be an integer in \[1, 65536\), but is '65536'"),
        ({"MASTER_PORT": None}, "MASTER_PORT must be set for more than one rank, but neither it nor SLURM_"),
        ({"MASTER_ADDR": None}, "MASTER_ADDR must be set for more than one rank, but neither it nor SLURM_"),
    ],
)
def test_an_invalid_variable_is_named_with_its_value(changes, words):
    environment = {name: value for name, value in {**TORCHRUN, **changes}.items() if value is not None}
    with pytest.raises(ArgumentError, match=words):
        parse_launch(environment)


@pytest.mark.parametrize("nodes", ["", "[1-2]", ",", "  "])
def test_a_list_without_hosts_is_rejected(nodes):
    with pytest.raises(ArgumentError, match="SLURM_NODELIST must be a list of hosts"):
        first_host(nodes)


@given(st.sets(st.integers(0, 20_000), min_size=1, max_size=50))
def test_a_list_of_ranks_is_short_and_counts_right(ranks):
    words = name_ranks(ranks)
    assert len(words) < 80
    named = [int(word) for word in words.replace(",", "").split() if word.isdigit()]
    if words.endswith("others"):
        assert sorted(ranks)[:8] == named[:-1]
        assert len(named) - 1 + named[-1] == len(ranks)
    else:
        assert named == sorted(ranks)


def test_of_many_failures_some_are_reported_and_the_rest_counted():
    text = describe_failures("building", [RankFailure(5, "OSError: full"), RankFailure(2, "ValueError: no")], total=900)
    assert text == "building: rank 2: ValueError: no; rank 5: OSError: full; 898 more failed"


def test_a_long_value_is_cut():
    text = describe_difference("the plan", {0: b"1", 1: b"2" * 5000})
    assert len(text) < 400
    assert "(5000 characters)" in text


def test_a_rank_that_sends_heartbeats_is_not_silent():
    timer = SilenceTimer(1.0)
    for second in range(20):
        timer.observe({0: second, 1: 7, 2: 0}, 1.0)
    assert timer.silent_for(10, [0, 1, 2]) == [1, 2]
    assert timer.silent_for(20, [0, 1, 2]) == []


def test_an_old_record_that_is_put_back_is_no_heartbeat():
    timer = SilenceTimer(1.0)
    for second in range(20):
        timer.observe({0: 5 + second % 2}, 1.0)
    assert timer.silent_for(18, [0]) == [0]


def test_time_without_observations_does_not_count():
    timer = SilenceTimer(1.0)
    timer.observe({0: 7}, 0.0)
    timer.observe({0: 7}, 3600.0)
    assert timer.silent_for(3, [0]) == []
