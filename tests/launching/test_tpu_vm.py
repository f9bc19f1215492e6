"""The commands for Cloud TPU VMs, given to a stand-in for gcloud."""

import shlex
import subprocess
import tarfile

import pytest

from MaxText.errors import UserError
from MaxText.launching import tpu_vm
from MaxText.launching.commands import Commands, Retry
from MaxText.launching.tpu_vm import TpuVm, TpuVmLaunch
from tests.launching.stand_ins import StandIn, path_with

FULL = (1, "", "ERROR: (gcloud) There is no more capacity in the zone.\n")
ZONE = ["--zone=z", "--project=p"]


@pytest.fixture
def gcloud(tmp_path, monkeypatch):
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", path_with(folder))
    return StandIn(folder, "gcloud")


@pytest.fixture
def shown():
    return []


@pytest.fixture
def launch(shown):
    def launch(dry_run=False, tries=3, **tpu):
        options = {"accelerator_type": "v5p-32", "version": "v2", "spot": True, **tpu}
        vm = TpuVm("pod", "z", "p", retry=Retry(tries, 0.0), **options)
        return TpuVmLaunch(vm, Commands(shown.append, dry_run=dry_run))

    return launch


def test_creating_waits_for_capacity(gcloud, launch, shown):
    gcloud.will_answer(FULL, FULL, (0, "", ""))
    launch().create()
    call = ["compute", "tpus", "tpu-vm", "create", "pod", *ZONE, "--accelerator-type=v5p-32",
            "--version=v2", "--spot"]  # fmt: skip
    assert gcloud.calls == [call] * 3
    assert "nothing is free: try 2 of 3 in 0 s" in shown


@pytest.mark.parametrize("action", ["create", "queue"])
def test_further_flags_reach_gcloud(gcloud, launch, shown, action):
    flags = ("--service-account=me", "--scopes=cloud-platform", "--network=n")
    getattr(launch(dry_run=True, flags=flags), action)()
    assert shlex.split(shown[0])[-3:] == list(flags)


@pytest.mark.parametrize(
    ("kind", "sets"), [("v5p-32", "=16 "), ("v5litepod-16", "=16 "), ("v3-8", "=8 "), ("", "")]
)
def test_a_run_expects_the_devices_of_its_type(launch, shown, kind, sets):
    launch(dry_run=True, accelerator_type=kind).run(["a.yml"], 3)
    assert (f"env MAXTEXT_NUM_DEVICES{sets}" in shown[0]) == bool(sets)
    assert ("MAXTEXT_NUM_DEVICES" in shown[0]) == bool(sets)


@pytest.mark.parametrize(
    ("errors", "calls"),
    [
        ("no more capacity", 3),
        ("PERMISSION_DENIED: you may not", 1),
        ("RESOURCE_EXHAUSTED: Quota limit 'TPUS' has been exceeded", 1),
    ],
)
def test_what_waiting_does_not_mend_is_not_waited_for(gcloud, launch, shown, errors, calls):
    gcloud.will_answer(*[(1, "", errors)] * 5)
    with pytest.raises(UserError, match=r"tpu-vm create pod .* ended with code 1"):
        launch().create()
    assert len(gcloud.calls) == calls
    assert errors in shown


def test_a_queued_resource_is_waited_for_and_asked_for_again(gcloud, launch):
    gcloud.will_answer(
        (0, "", ""), (0, "WAITING_FOR_RESOURCES\n", ""), (0, "FAILED\n", ""), (0, "", ""),
        (0, "", ""), (0, "PROVISIONING\n", ""), (0, "ACTIVE\n", ""),
    )  # fmt: skip
    launch().queue()
    actions = [call[3] for call in gcloud.calls]
    assert actions == ["create", "describe", "describe", "delete", "create", "describe", "describe"]
    assert gcloud.calls[0] == [
        "compute", "tpus", "queued-resources", "create", "pod", *ZONE, "--node-id=pod",
        "--accelerator-type=v5p-32", "--runtime-version=v2", "--spot",
    ]  # fmt: skip
    assert gcloud.calls[3][-2:] == ["--force", "--quiet"]


def test_a_queue_that_refuses_for_good(gcloud, launch):
    gcloud.will_answer(*[(0, "", ""), (0, "SUSPENDED", ""), (0, "", "")] * 2)
    with pytest.raises(UserError, match="ended in state SUSPENDED, 2 times"):
        launch(tries=2).queue()


def test_the_working_tree_is_copied_without_what_git_ignores(gcloud, launch, monkeypatch, tmp_path):
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / ".gitignore").write_text("ignored\n")
    (tree / "ignored").write_text("")
    (tree / "kept").write_text("")
    subprocess.run(["git", "init", "-q"], cwd=tree, check=True)
    monkeypatch.setattr(tpu_vm, "REPOSITORY", tree)
    archive = tmp_path / "a.tar.gz"
    tpu_vm._pack(archive)
    with tarfile.open(archive) as tar:
        assert sorted(tar.getnames()) == [".gitignore", "kept"]
    launch().copy()
    scp, ssh = gcloud.calls
    assert scp[3] == "scp"
    assert scp[5] == "pod:maxtext.tar.gz"
    assert scp[-1] == "--worker=all"
    assert ssh[-2:] == [
        "--worker=all",
        "--command=mkdir -p maxtext && tar -xzf maxtext.tar.gz -C maxtext",
    ]


def test_a_run_in_the_background_of_every_host(gcloud, launch, tmp_path):
    launch().run(["configs/a.yml", "prompt=it's here"], max_restarts=4)
    ((*_, worker, command),) = gcloud.calls
    assert worker == "--worker=all"
    # The line, as the shell of a host would read it.
    home = tmp_path / "home"
    (home / "maxtext" / ".venv" / "bin").mkdir(parents=True)
    python = home / "maxtext" / ".venv" / "bin" / "python"
    python.write_text('#!/bin/bash\nprintf "<%s>" "$@"\nsleep 20\n')
    python.chmod(0o755)
    line = command.removeprefix("--command=")
    subprocess.run(["bash", "-c", line], cwd=home, check=True)
    pid = int((home / "maxtext" / "logs" / "pid").read_text())
    again = subprocess.run(["bash", "-c", line], cwd=home, capture_output=True, text=True)
    assert again.returncode == 1
    assert "a run is at work here" in again.stderr
    launch().stop()
    stop = gcloud.calls[-1][-1].removeprefix("--command=")
    subprocess.run(["bash", "-c", stop], cwd=home, check=True)
    while subprocess.run(["kill", "-0", str(pid)], capture_output=True).returncode == 0:
        pass
    said = (home / "maxtext" / "logs" / "launch.log").read_text()
    assert said.startswith("<MaxText/launch.py><local><1><--supervise><--max-restarts=4>")
    assert "<--><configs/a.yml><prompt=it's here>" in said


def test_a_dry_run_shows_the_same_commands_and_runs_none(gcloud, launch, shown):
    dry = launch(dry_run=True)
    for action in ("create", "queue", "copy", "setup", "status", "stop", "delete", "delete_queued"):
        getattr(dry, action)()
    dry.logs(20, True, "1")
    assert gcloud.calls == []
    commands = list(shown)
    shown.clear()
    wet = launch()
    wet.create()
    wet.logs(20, True, "1")
    assert [line for line in shown if line.startswith("+")] == [commands[0], commands[-1]]
    assert [shlex.split(line)[2:] for line in shown] == [call[0:] for call in gcloud.calls]
    assert shlex.split(commands[-1])[-1] == "--command=tail -n 20 -F maxtext/logs/launch.log"


def test_what_is_missing(gcloud, launch, monkeypatch, tmp_path):
    with pytest.raises(UserError, match="create needs --type and --version"):
        launch(version="").create()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="gcloud is not installed here"):
        launch().status()
