"""Which processes a run has, by the variables of those who start them."""

import importlib.util

import pytest

from MaxText.runtime.start_up import Cluster, find_cluster
from tests.refusals import refused

SLURM = {
    "SLURM_JOB_ID": "4242",
    "SLURM_STEP_NODELIST": "gpu[007-010,12],cpu3",
    "SLURM_NTASKS": "8",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x4)",
}
OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "2"}
OPEN_MPI |= {"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
JAX = {"JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "3"}
ADDRESS = {"JAX_COORDINATOR_ADDRESS": "host:99"}
BY_SLURM = "SLURM_NTASKS and SLURM_PROCID"
BY_NODES = "NNODES and NODE_RANK"
BY_MPI = "OMPI_COMM_WORLD_SIZE and OMPI_COMM_WORLD_RANK"
BY_PMI = "PMI_SIZE and PMI_RANK"

pytestmark = pytest.mark.usefixtures("chips")


def test_nothing_said_is_one_process():
    assert find_cluster({}, "auto") is None
    assert find_cluster({"JAX_NUM_PROCESSES": "1", "JAX_PROCESS_ID": "0"}, "auto") is None
    # Schedulers set it for purposes of their own.
    assert find_cluster({"NNODES": "4"}, "auto") is None
    # A batch script itself, without srun.
    batch = {name: value for name, value in SLURM.items() if name != "SLURM_STEP_NODELIST"}
    assert find_cluster(batch, "auto") is None


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (JAX | ADDRESS, Cluster("JAX_NUM_PROCESSES and JAX_PROCESS_ID", "host:99", 4, 3)),
        ({"NNODES": "2", "NODE_RANK": "0", **ADDRESS}, Cluster(BY_NODES, "host:99", 2, 0)),
        ({"PMI_SIZE": "2", "PMI_RANK": "1", **ADDRESS}, Cluster(BY_PMI, "host:99", 2, 1)),
        (OPEN_MPI | ADDRESS, Cluster(BY_MPI, "host:99", 4, 2, (0,))),
        (OPEN_MPI, Cluster(BY_MPI, None, 4, 2, (0,))),
        # Started by mpirun in a job of SLURM.
        (SLURM | OPEN_MPI, Cluster(BY_MPI, None, 4, 2, (0,))),
        (SLURM | ADDRESS, Cluster(BY_SLURM, "host:99", 8, 5, (1,))),
        (SLURM, Cluster(BY_SLURM, None, 8, 5, (1,))),
        # All GPUs of its node, and where the scheduler has given each its own.
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "1(x8)"}, Cluster(BY_SLURM, None, 8, 5, ())),
        (SLURM | {"CUDA_VISIBLE_DEVICES": "0"}, Cluster(BY_SLURM, None, 8, 5, ())),
        (SLURM | {"JAX_LOCAL_DEVICE_IDS": "0,1"}, Cluster(BY_SLURM, None, 8, 5)),
    ],
)
def test_launchers(environment, expected):
    assert find_cluster(environment, "gpu") == expected


@pytest.mark.parametrize(
    ("environment", "address"),
    [
        ({"JAX_COORDINATOR_ADDRESS": "host"}, "host:1234"),
        ({"JAX_COORDINATOR_IP": "10.0.0.1", "JAX_COORDINATOR_PORT": "77"}, "10.0.0.1:77"),
        ({"JAX_COORDINATOR_IP": "fe80::1"}, "[fe80::1]:1234"),
    ],
)
def test_addresses(environment, address):
    found = find_cluster(JAX | environment, "auto")
    assert found is not None
    assert found.address == address


def test_pods_of_an_indexed_job_ask_kubernetes(monkeypatch):
    pod = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "1"}
    assert find_cluster(pod, "cpu") == Cluster("the Job of this pod")
    assert find_cluster({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "cpu") is None
    # Tasks of an array, which are single processes.
    assert find_cluster(pod | {"JAX_NUM_PROCESSES": "1", "JAX_PROCESS_ID": "0"}, "cpu") is None
    # Without the client, JAX cannot.
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert find_cluster(pod, "cpu") is None


@pytest.mark.parametrize(
    "environment",
    [
        {"TPU_WORKER_HOSTNAMES": "a,b"},
        {"TPU_PROCESS_ADDRESSES": "a:1,b:1"},
        {"MEGASCALE_NUM_SLICES": "2"},
    ],
)
def test_tpus_that_name_others(environment):
    (name,) = environment
    assert find_cluster(environment, "auto") == Cluster(name)
    assert find_cluster(environment, "cpu") is None
    assert find_cluster({**environment, "JAX_PLATFORMS": "cpu"}, "auto") is None


def test_tpu_chips_ask_the_metadata(chips):
    chips.append("/dev/accel0")
    found = find_cluster({"TPU_WORKER_HOSTNAMES": "localhost"}, "tpu")
    assert found is not None
    assert not found.is_certain
    assert find_cluster({"TPU_SKIP_MDS_QUERY": "1"}, "tpu") is None
    assert find_cluster({}, "gpu") is None


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        ({"JAX_NUM_PROCESSES": "2"}, "JAX_PROCESS_ID"),
        ({"JAX_PROCESS_ID": "1"}, "JAX_NUM_PROCESSES"),
        ({"NODE_RANK": "1"}, "NNODES"),
        ({"JAX_NUM_PROCESSES": "two", "JAX_PROCESS_ID": "0"}, "JAX_NUM_PROCESSES=two"),
        ({"NNODES": "2", "NODE_RANK": "2"}, "NODE_RANK=2 .* NNODES=2"),
        ({"NNODES": "2", "NODE_RANK": "1"}, "JAX_COORDINATOR_ADDRESS=HOST:PORT"),
        ({"PMI_SIZE": "2", "PMI_RANK": "1"}, "JAX_COORDINATOR_ADDRESS=HOST:PORT"),
    ],
)
def test_mistakes_name_the_variable(environment, named):
    refused(named, find_cluster, environment, "auto")
