"""A save that fails is told in one message, whatever Orbax's threads would print."""

import pytest

from tests.parallelism.child_programs import ended, started

PROGRAM = """
    import resource, signal, sys
    from etils import epath
    from MaxText.checkpointing.manager import Checkpoints
    from MaxText.configuration.training_sections import Checkpoint
    from MaxText.errors import UserError
    from tests.checkpointing.small_state import fresh_state
    from tests.checkpointing.test_manager import save_steps

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))  # as a disk that is full
    checkpoints = Checkpoints(
        epath.Path(sys.argv[1]) / "checkpoints",
        Checkpoint(async_checkpointing=sys.argv[2] == "1"),
        0,
    )
    try:
        save_steps(checkpoints, fresh_state(), [0])
        checkpoints.close()
    except UserError as error:
        print("error:", str(error).splitlines()[0][:70])
"""


@pytest.mark.parametrize("asynchronous", ["0", "1"])
def test_a_disk_that_is_full_is_told_in_one_message(tmp_path, asynchronous):
    with started(PROGRAM, str(tmp_path), asynchronous) as process:
        code, output = ended(process)
    assert code == 0, output
    assert output.startswith("error: the checkpoint of step 0 could not be written to"), output
    assert len(output.splitlines()) == 1
