"""The commands for Cloud TPU VMs, given to a stand-in for gcloud."""

import re
import shlex
import subprocess
import tarfile
import time
from pathlib import Path

import pytest

from MaxText.errors import UserError
from MaxText.launchers import tpu_vm
from MaxText.launchers.commands import Commands
from MaxText.launchers.tpu_vm import GcloudOptions, TpuVm

FULL = (1, "", "ERROR: (gcloud) There is no more capacity in the zone.\n")
ZONE = ["--zone=z", "--project=p"]


@pytest.fixture
def gcloud(stand_in):
    return stand_in("gcloud")


@pytest.fixture
def shown():
    return []


@pytest.fixture
def launch(shown):
    def launch(dry_run=False, **changed):
        options = {"accelerator_type": "v5p-32", "version": "v2", "spot": True, "max_attempts": 3}
        place = {"name": "pod", "zone": "z", "project": "p", "retry_seconds": 0.0}
        vm = GcloudOptions(**options | place | changed)
        return TpuVm(vm, Commands(shown.append, dry_run=dry_run))

    return launch


def test_creating_waits_for_capacity(gcloud, launch, shown):
    gcloud.will_answer(FULL, FULL, (0, "", ""))
    launch().create()
    call = ["compute", "tpus", "tpu-vm", "create", "pod", *ZONE, "--accelerator-type=v5p-32",
            "--version=v2", "--spot"]  # fmt: skip
    assert gcloud.calls == [call] * 3
    assert any("Attempt 2/3" in line for line in shown)


def test_what_reaches_gcloud_and_the_run(launch, shown):
    flags = ("--service-account=me", "--scopes=cloud-platform", "--network=n")
    for action in ("create", "queue"):
        shown.clear()
        getattr(launch(dry_run=True, gcloud=flags), action)()
        assert shlex.split(shown[0])[-3:] == list(flags)
    # A run expects the devices of its type.
    for kind, number in (("v5p-32", "16"), ("v5litepod-16", "16"), ("v3-8", "8"), ("", None)):
        shown.clear()
        launch(dry_run=True, accelerator_type=kind).run(["a.yml"])
        found = re.search(r"env MAXTEXT_NUM_DEVICES=(\d+) ", shown[0])
        assert (found and found[1]) == number


@pytest.mark.parametrize(
    ("errors", "calls"),
    [
        ("no more capacity", 3),
        ("PERMISSION_DENIED: you may not", 1),
        ("RESOURCE_EXHAUSTED: Quota limit 'TPUS' has been exceeded", 1),
    ],
)
def test_only_transient_failures_are_waited_for(gcloud, launch, shown, errors, calls):
    gcloud.will_answer(*[(1, "", errors)] * 5)
    with pytest.raises(UserError, match=r"tpu-vm create pod .* code 1"):
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
    # One that is refused for good.
    gcloud.will_answer(*[(0, "", ""), (0, "SUSPENDED", ""), (0, "", "")] * 2)
    with pytest.raises(UserError, match="SUSPENDED, 2 times"):
        launch(max_attempts=2).queue()


def test_the_working_tree_is_copied_without_what_git_ignores(gcloud, launch, monkeypatch, tmp_path):
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / ".gitignore").write_text("ignored\n")
    (tree / "ignored").write_text("")
    (tree / "kept").write_text("")
    subprocess.run(["git", "init", "-q"], cwd=tree, check=True)
    monkeypatch.setattr(tpu_vm, "REPOSITORY", tree)
    archived = []
    monkeypatch.setattr(tarfile.TarFile, "add", lambda *_, arcname, **__: archived.append(arcname))
    launch().copy()
    assert sorted(archived) == [".gitignore", "kept"]
    scp, (*_, worker, command) = gcloud.calls
    assert (scp[3], scp[5], scp[-1], worker) == ("scp", "pod:maxtext.tar.gz", *["--worker=all"] * 2)
    assert command == "--command=mkdir -p maxtext && tar -xzf maxtext.tar.gz -C maxtext"


def test_a_run_in_the_background_of_every_host(gcloud, launch, tmp_path):
    launch(max_restarts=4).run(["configs/a.yml", "prompt=it's here"])
    ((*_, worker, command),) = gcloud.calls
    assert worker == "--worker=all"
    # The line, as the shell of a host would read it.
    home = tmp_path / "home"
    python = home / "maxtext" / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/bash\nprintf "<%s>" "$@"\nexec sleep 20\n')
    python.chmod(0o755)
    line = command.removeprefix("--command=")
    subprocess.run(["bash", "-c", line], cwd=home, check=True)
    pid = int((home / "maxtext" / "logs" / "pid").read_text())
    again = subprocess.run(["bash", "-c", line], cwd=home, capture_output=True, text=True)
    assert again.returncode == 1
    launch().stop()
    stop = gcloud.calls[-1][-1].removeprefix("--command=")
    subprocess.run(["bash", "-c", stop], cwd=home, check=True)
    while Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text():
        time.sleep(0.005)
    said = (home / "maxtext" / "logs" / "launch.log").read_text()
    assert said.startswith("<MaxText/launch.py><local><1><--supervise><--max-restarts=4>")
    assert "<--><configs/a.yml><prompt=it's here>" in said


def test_a_dry_run_shows_the_same_commands_and_runs_none(gcloud, launch, shown):
    def act(launched):
        launched.create()
        for action in ("logs", "setup", "status", "stop", "delete", "delete_queued"):
            getattr(launched, action)()

    logs = {"tail": 20, "follow": True, "worker": "1"}
    act(launch(dry_run=True, **logs))
    assert gcloud.calls == []
    commands = list(shown)
    shown.clear()
    act(launch(**logs))
    assert shown == commands
    assert [shlex.split(line)[2:] for line in shown] == gcloud.calls
    assert gcloud.calls[1][-1] == "--command=tail -n 20 -F maxtext/logs/launch.log"


def test_what_is_missing(gcloud, launch, monkeypatch, tmp_path):
    with pytest.raises(UserError, match="--accelerator-type and --version"):
        launch(version="").create()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="gcloud is not installed"):
        launch().status()
