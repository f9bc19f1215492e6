"""A disk that is full, or can only be read, in the middle of a run."""

import pathlib
import subprocess
import sys
import textwrap

import pytest

ROOT = pathlib.Path(__file__).parents[2]
# A user namespace of its own, in which a small disk can be mounted; it goes with the process.
NAMESPACE = ["unshare", "--user", "--map-root-user", "--mount"]


@pytest.fixture(scope="module")
def small_disk():
    """Mounts a disk of 3 MB at a folder, in a child process."""
    mount = [*NAMESPACE, "mount", "-t", "tmpfs", "-o", "size=3m", "none", "/mnt"]
    try:
        subprocess.run(mount, check=True, capture_output=True, timeout=30)
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"no disk can be mounted here: {error}")


def run_on_small_disk(folder, body):
    """Runs `body` in a process whose `folder` is the small disk; returns what it printed."""
    script = textwrap.dedent(
        f"""
        import os, pathlib, subprocess, sys, time
        sys.path.insert(0, {str(ROOT)!r})
        from MaxText.checkpointing.manager import Checkpoints
        from MaxText.checkpointing.run_folder import prepare_run_folder
        from MaxText.configuration.training_sections import Checkpoint
        from MaxText.errors import UserError
        from tests.checkpointing.small_state import abstract, assert_bit_equal, fresh_state
        from tests.checkpointing.small_state import on_host, update
        disk = pathlib.Path({str(folder)!r})
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "none", disk], check=True)
        def fill():
            with open(disk / "others", "wb", buffering=0) as file:
                try:
                    while True:
                        file.write(os.urandom(4096))
                except OSError:
                    file.truncate(file.tell() - 60_000)  # room for a small part of a checkpoint
        def show(line):
            print("SHOWN", line, flush=True)
        """
    ) + textwrap.dedent(body)
    process = subprocess.run(
        [*NAMESPACE, sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert process.returncode == 0, process.stdout + process.stderr[-3000:]
    return process.stdout


@pytest.mark.usefixtures("small_disk")
@pytest.mark.parametrize("asynchronous", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_full_disk_is_told_and_the_last_checkpoint_stays(tmp_path, asynchronous):
    output = run_on_small_disk(
        tmp_path,
        f"""
        section = Checkpoint(async_checkpointing={asynchronous}, max_to_keep=1)
        checkpoints = Checkpoints(disk / "checkpoints", section, show=show)
        state, kept = fresh_state(rows=1000), {{}}
        for step in range(6):
            state = update(state)
            if step in (1, 4):
                fill()
            if step == 2:
                manager = checkpoints._orbax_manager
                while manager is not None and manager.is_saving_in_progress():
                    time.sleep(0.01)
                (disk / "others").unlink()
            kept[step] = on_host(state)
            try:
                saved = checkpoints.save(step, state, {{"step": step + 1}}, {{}})
                print("SAVE", step, saved)
                if step in (0, 3):
                    checkpoints.wait()
            except UserError as error:
                print("STOPPED", step, error)
                break
        try:
            checkpoints.close()
        except UserError as error:
            print("STOPPED", step, error)
        print("STEPS", checkpoints.steps())
        again = Checkpoints(disk / "checkpoints", section, show=show)
        restored, position, _ = again.restore(3, abstract(state))
        assert_bit_equal(restored, kept[3])
        assert not [path.name for path in (disk / "checkpoints").iterdir() if "tmp" in path.name]
        (disk / "others").unlink()
        print("SAVE", again.save(6, update(state), None, {{}}))
        again.close()
        """,
    )
    warned = "SHOWN !!! WARNING: the checkpoint of step {} could not be written"
    assert warned.format(1) in output
    assert "the checkpoint of step 0 is on disk. The run goes on" in output
    assert warned.format(2) not in output
    assert warned.format(4) in output
    assert "STOPPED 5 the checkpoint of step 5 could not be written" in output
    assert "No space left on device" in output or "Disk quota" in output
    assert "the checkpoint of step 3 is on disk. Free space" in output
    assert "STEPS [3]" in output
    assert output.endswith("SAVE True\n")


@pytest.mark.usefixtures("small_disk")
def test_a_folder_that_can_only_be_read(tmp_path):
    output = run_on_small_disk(
        tmp_path,
        """
        checkpoints = Checkpoints(disk / "checkpoints", Checkpoint(), show=show)
        state = update(fresh_state())
        checkpoints.save(0, state, None, {})
        checkpoints.wait()
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        for step in (1, 2):
            state = update(state)
            try:
                print("SAVE", step, checkpoints.save(step, state, None, {}))
            except UserError as error:
                print("STOPPED", step, error)
        checkpoints.close()
        restored, _, _ = checkpoints.restore(0, abstract(state))
        assert_bit_equal(restored, on_host(update(fresh_state())))
        try:
            prepare_run_folder(disk)
        except UserError as error:
            print("REFUSED", error)
        """,
    )
    assert "SHOWN !!! WARNING: the checkpoint of step 1 could not be written" in output
    assert "SAVE 1 False" in output
    assert "STOPPED 2 the checkpoint of step 2 could not be written" in output
    assert "REFUSED cannot write to the run folder" in output
    assert output.count("Read-only file system") == 3
