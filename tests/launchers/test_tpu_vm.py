"""The commands for Cloud TPU VMs, given to a stand-in for gcloud."""

import re
import shlex
import subprocess
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest

from MaxText.errors import UserError
from MaxText.launchers import tpu_vm
from MaxText.launchers.commands import Commands
from MaxText.launchers.tpu_vm import GcloudOptions, TpuVm
from tests.house.sources import run_main

FULL = (1, "", "ERROR: (gcloud) There is no more capacity in the zone.\n")
ZONE = ["--zone=z", "--project=p"]


@pytest.fixture
def gcloud(stand_in):
    return stand_in("gcloud")


@pytest.fixture
def shown():
    return []


@pytest.fixture
def launch(shown, monkeypatch):
    monkeypatch.setattr(tpu_vm, "POLL_SECONDS", 0.0)

    def launch(dry_run=False, **changed):
        options: dict[str, Any] = {"accelerator_type": "v5p-32", "version": "v2", "spot": True}
        options |= {"name": "pod", "zone": "z", "project": "p", **changed}
        vm = GcloudOptions(**options)
        return TpuVm(vm, Commands(shown.append, dry_run=dry_run))

    return launch


def test_creating(gcloud, launch):
    """One request; waiting for capacity is for queued resources."""
    gcloud.will_answer(FULL)
    with pytest.raises(UserError, match=r"(?s)tpu-vm create pod .* code 1.*the action queue"):
        launch().create()
    assert gcloud.calls == [
        [
            "compute",
            "tpus",
            "tpu-vm",
            "create",
            "pod",
            *ZONE,
            "--accelerator-type=v5p-32",
            "--version=v2",
            "--spot",
        ]
    ]


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


def test_a_queued_resource_is_waited_for(gcloud, launch):
    gcloud.will_answer(
        (0, "", ""),
        (0, "WAITING_FOR_RESOURCES\n", ""),
        (0, "PROVISIONING\n", ""),
        (0, "ACTIVE\n", ""),
    )
    launch().queue()
    assert [call[3] for call in gcloud.calls] == ["create", *["describe"] * 3]
    assert gcloud.calls[0] == [
        "compute",
        "tpus",
        "queued-resources",
        "create",
        "pod",
        *ZONE,
        "--node-id=pod",
        "--accelerator-type=v5p-32",
        "--runtime-version=v2",
        "--spot",
    ]
    gcloud.will_answer((0, "", ""), (0, "SUSPENDED", ""))
    with pytest.raises(UserError, match=r"ended in state SUSPENDED.* gcloud delete-queued"):
        launch().queue()


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
    launch().run(["configs/a.yml", "prompt=it's here"])
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
    said = (home / "maxtext" / "logs" / "train.log").read_text()
    assert said == "<MaxText/train.py><configs/a.yml><prompt=it's here>"


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
    assert gcloud.calls[1][-1] == "--command=tail -n 20 -F maxtext/logs/train.log"


def test_what_is_missing(gcloud, launch, monkeypatch, tmp_path):
    with pytest.raises(UserError, match="--accelerator-type and --version"):
        launch(version="").create()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="gcloud is not installed"):
        launch().status()


ACCOUNT = "me@project.iam.gserviceaccount.com"
SCOPES = "https://www.googleapis.com/auth/cloud-platform,storage-rw"


def dry_run(capsys, action, *flags):
    """Returns the exit code of launch.py, the first gcloud command, and the errors."""
    place = ["--name=pod", "--zone=z", "--accelerator-type=v5p-32", "--version=v2", "--dry-run"]
    code = run_main("launch.py", ["gcloud", action, *place, *flags])
    output, errors = capsys.readouterr()
    return code, shlex.split(output.partition("\n")[0])[1:], errors


@pytest.mark.parametrize(
    ("action", "flags", "start", "end"),
    [
        ("create", ["--preemptible"], ["gcloud", "compute"], ["--preemptible"]),
        ("queue", ["--best-effort"], ["gcloud", "alpha", "compute"], ["--best-effort"]),
        ("queue", ["--best_effort=true"], ["gcloud", "alpha", "compute"], ["--best-effort"]),
        ("queue", ["--spot"], ["gcloud", "compute"], ["--spot"]),
        (
            "create",
            [f"--service-account={ACCOUNT}", f"--scopes={SCOPES}"],
            ["gcloud", "compute"],
            [f"--service-account={ACCOUNT}", f"--scopes={SCOPES}"],
        ),
        (
            "queue",
            ["--service-account", ACCOUNT, "--scopes", SCOPES, "--gcloud=--network=n"],
            ["gcloud", "compute"],
            [f"--service-account={ACCOUNT}", f"--scopes={SCOPES}", "--network=n"],
        ),
        (
            "queue",
            ["--gcloud=--guaranteed", "--gcloud=--reserved"],
            ["gcloud", "compute"],
            ["--guaranteed", "--reserved"],
        ),
    ],
)
def test_flags_of_muddformers_commands(capsys, action, flags, start, end):
    code, command, errors = dry_run(capsys, action, *flags)
    assert (code, errors) == (0, "")
    assert command[: len(start)] == start
    assert command[-len(end) :] == end


@pytest.mark.parametrize(
    ("action", "flags", "problem"),
    [
        ("create", ["--spot", "--preemptible"], "--spot and --preemptible contradict"),
        ("create", ["--spot", "--gcloud=--preemptible"], "--spot and --preemptible contradict"),
        ("queue", ["--spot", "--best-effort"], "--spot and --best-effort contradict"),
        ("queue", ["--spot", "--gcloud=--best-effort"], "--spot and --best-effort contradict"),
        ("queue", ["--gcloud=--spot", "--best-effort"], "--spot and --best-effort contradict"),
        ("queue", ["--gcloud=--spot", "--gcloud=--best-effort"], "--spot and --best-effort"),
        ("create", ["--gcloud=--spot", "--gcloud=--preemptible"], "--spot and --preemptible"),
        ("queue", ["--best-effort", "--gcloud=--guaranteed"], "--best-effort and --guaranteed"),
        ("create", ["--spot", "--gcloud=--reserved"], "--spot and --reserved contradict"),
        ("create", ["--spot", "--gcloud=--spot"], "--spot is given both by itself and as"),
        ("create", ["--preemptible", "--gcloud=--preemptible"], "--preemptible is given both"),
        ("queue", ["--best-effort", "--gcloud=--best-effort"], "--best-effort is given both"),
        ("create", ["--scopes=a", "--gcloud=--scopes=b"], "--scopes is given both"),
        (
            "create",
            ["--service-account=a", "--gcloud=--service-account", "--gcloud=b"],
            "--service-account is given both",
        ),
        ("create", ["--gcloud=--scopes=a", "--gcloud=--scopes=b"], "--scopes is given twice"),
        ("create", ["--gcloud=--zone=b"], "--zone is given both"),
        ("queue", ["--gcloud=--runtime-version=b"], "--runtime-version is given both"),
        ("create", ["--best-effort"], "--best-effort is a flag of the action queue"),
        ("create", ["--gcloud=--best-effort"], "--best-effort is a flag of the action queue"),
        ("queue", ["--preemptible"], "--preemptible is a flag of the action create"),
    ],
)
def test_contradictory_flags_are_refused(capsys, action, flags, problem):
    code, command, errors = dry_run(capsys, action, *flags)
    assert (code, command) == (2, [])
    assert errors.startswith("error: ")
    assert problem in errors
    # Other actions come later, so nothing is run before.
    code, command, errors = dry_run(capsys, "delete", action, *flags)
    assert (code, command) == (2, [])
