"""A sweep on a Ray cluster of two nodes, and as SLURM array jobs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from common.errors import UserError
from extras import cluster
from helpers.ablation import arguments, arm, out, quick, rows_of, same_code, steps_of, stub  # noqa: F401

ROPE = arm(rope=dict(position="rope"))


@pytest.fixture
def drive_cluster(data_dir, out, quick, stub):
    """drive_cluster(*options): the exit status of a small sweep."""
    return lambda *options: cluster.main(arguments(data_dir, out, *options), stub)


def test_a_slurm_array_is_written_and_gathered(drive_cluster, out, capsys):
    what = [ROPE, "--seeds=1", "--curve=[2]", "--emit=slurm"]
    assert drive_cluster(*what, "--dry_run") == 0 and not out.exists()
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for runs in (5, 2):  # the curve and the base, then rope and the replicate
        assert drive_cluster(*what) == 0
        script = (out / "slurm.sh").read_text()
        assert f"#SBATCH --array=0-{runs - 1}\n" in script and "--gres" not in script
        assert len((out / "commands.txt").read_text().splitlines()) == runs
        for task in [*range(runs), runs - 1]:  # the last one once more, as after a requeue
            task_of = environment | {"SLURM_ARRAY_TASK_ID": str(task)}
            subprocess.run(["bash", out / "slurm.sh"], env=task_of, check=True, timeout=60)
    assert len(rows_of(out)) == 5
    assert drive_cluster(*what) == 0  # nothing is left to train
    assert "all runs are done" in capsys.readouterr().out
    assert {row["status"] for row in rows_of(out).values()} == {"done"} and len(rows_of(out)) == 7
    assert steps_of(out / "runs" / "rope-s0-lr1") == ["1", "2", "3", "4"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this is no login node")
def test_a_login_node_without_a_gpu_plans_and_writes_the_job(drive_cluster, out, capsys):
    out = out.with_name("my sweep")
    cuda = [ROPE, "--seeds=2", "--device=cuda", f"--out_dir={out}"]
    options = """-p gpu --comment="two words" --account='me"""
    assert drive_cluster(*cuda, "--emit=slurm", f"--sbatch={options}") == 0
    script = (out / "slurm.sh").read_text().splitlines()
    quoted = f"--output='{out}/slurm-%a.txt'"
    for line in ("--gres=gpu:1", options, "--job-name='my sweep'", quoted):
        assert f"#SBATCH {line}" in script
    assert f"export PATH={Path(sys.executable).parent}:$PATH" in script  # the virtual environment
    assert "--device=cuda" in (out / "commands.txt").read_text()
    assert drive_cluster(*cuda, "--engine=ray", "--dry_run") == 0
    assert "an unknown time" in capsys.readouterr().out


def test_one_cluster_is_named(drive_cluster):
    for what, words in (([], "no engine"), (["--engine=ray", "--emit=slurm"], "two engines")):
        with pytest.raises(UserError, match=f"{words} .* given .engine, emit"):
            drive_cluster(ROPE, *what)


def test_ray_runs_a_sweep_on_two_nodes(drive_cluster, out, monkeypatch):
    monkeypatch.setenv("STUB_FORGETS", "1")  # the nodes would measure a model that is none
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    nodes = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}
    )
    try:
        nodes.add_node(num_cpus=1)
        ray.init(address=nodes.address, log_to_driver=False, logging_level="error")
        two = arm(rope=dict(position="rope"), crash=dict(norm="dyt"))
        assert drive_cluster(two, "--seeds=2", "--engine=ray") == 1
        rows = rows_of(out)
        failed = {name[0] for name, row in rows.items() if row["status"] == "failed"}
        assert len(rows) == 8 and failed == {"crash"}
        assert len({row["node"] for row in rows.values()}) == 2
        # Once more: what is done is not done again.
        drive_cluster(two, "--seeds=2", "--engine=ray")
        assert steps_of(rows["rope", 0, 1, "report"]) == ["1", "2", "3", "4"]
    finally:
        ray.shutdown()
        nodes.shutdown()
