"""SIGTERM in a run of one process: at a step's end, before the first one, twice, and ignored."""

import signal

import pytest

from MaxText import exit_codes
from tests.parallelism.child_programs import ended, started, wait_for

LOOP = """
    import signal, sys, time
    from MaxText import exit_codes
    from MaxText.parallelism.preemption import StopSignal

    stop = StopSignal.install()
    if "compile" in sys.argv:  # Python's handler never runs while C code does not return
        signal.signal(signal.SIGINT, lambda *_: None)
    print("installed", flush=True)
    for step in range(10_000 if "loop" in sys.argv else 0):
        time.sleep(0.01)
        if stop.requested(step):
            print("saving after", step, flush=True)
            print(stop.summary(step, "first"))
            sys.exit(stop.exit_code)
        print("step", step, flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize(
    ("number", "name", "how", "code"),
    [
        (signal.SIGTERM, "SIGTERM", "Preempted", exit_codes.PREEMPTED),
        (signal.SIGINT, "Ctrl-C", "Interrupted", exit_codes.INTERRUPTED),
    ],
)
@pytest.mark.usefixtures("ctrl_c_counts")
def test_the_step_is_finished_and_the_state_saved(number, name, how, code):
    with started(LOOP, "loop") as process:
        before = wait_for(process, "step 3")
        assert "saving" not in before
        process.send_signal(number)
        found, output = ended(process)
    assert found == code
    assert f"{name}: saving and stopping after this step" in output
    assert output.count("saving after") == 1
    assert f"{how}. Saved: step " in output
    assert "run_name=first" in output


@pytest.mark.usefixtures("ctrl_c_counts")
def test_ctrl_c_while_compiling_is_not_delayed_by_the_compiler():
    with started(LOOP, "compile") as process:
        wait_for(process, "installed")
        process.send_signal(signal.SIGINT)
        code, output = ended(process)
    assert code == exit_codes.INTERRUPTED
    assert output == "Ctrl-C before the first step: stopping, there is nothing to save\n"


def test_before_the_first_update_there_is_nothing_to_save():
    with started(LOOP) as process:
        wait_for(process, "installed")
        process.send_signal(signal.SIGTERM)
        code, output = ended(process)
    assert code == exit_codes.PREEMPTED
    assert "nothing to save" in output


def test_a_second_one_ends_a_process_that_does_not_come_to_python():
    # CDLL gives Python's lock back, as jax does while it waits for a device.
    program = """
        import ctypes
        from MaxText.parallelism.preemption import StopSignal

        stop = StopSignal.install()
        stop.requested(0)
        print("waiting", flush=True)
        ctypes.CDLL(None).sleep(60)
        while not stop.requested(0):
            print("again", flush=True)
            ctypes.CDLL(None).sleep(60)
        print("requested", flush=True)
        ctypes.CDLL(None).sleep(60)
    """
    with started(program) as process:
        wait_for(process, "waiting")
        process.send_signal(signal.SIGTERM)
        wait_for(process, "a second one stops at once")
        process.send_signal(signal.SIGTERM)
        code, output = ended(process)
    assert code == 128 + signal.SIGTERM
    assert "second SIGTERM: stopping at once" in output


def test_who_ignores_sigterm_goes_on_ignoring_it():
    program = """
        import signal
        from MaxText.parallelism.preemption import StopSignal

        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        stop = StopSignal.install()
        signal.raise_signal(signal.SIGTERM)
        print("requested:", stop.requested(0))
    """
    with started(program) as process:
        code, output = ended(process)
    assert (code, output) == (0, "requested: False\n")
