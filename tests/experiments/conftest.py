"""No environment variable of the machine may reach the configurations under test."""

import jax
import pytest

from MaxText.config.schema import flatten
from MaxText.experiments import execution
from tests.config.conftest import _clean_environment  # noqa: F401
from tests.experiments import small_comparison, stand_in


@pytest.fixture
def configs(tmp_path, monkeypatch):
    """Small configurations, a.yml, b.yml and c.yml, which has stages, in the working folder."""
    monkeypatch.chdir(tmp_path)
    texts = {"a": small_comparison.A, "b": small_comparison.B, "c": small_comparison.C}
    for name, text in texts.items():
        (tmp_path / f"{name}.yml").write_text(text)
    return tmp_path


@pytest.fixture
def one_device(configs, monkeypatch):
    """Comparisons in process: one device, no terminal, a report that is a list of its contents."""

    def write_report(runs, folder, **contents):
        (folder / "report.html").write_text(str(contents))
        return folder / "report.html"

    platforms = jax.config.jax_platforms
    monkeypatch.setattr(execution, "count_devices", lambda hardware: 1)
    monkeypatch.setattr(execution, "write_report", write_report)
    monkeypatch.setattr("sys.stderr.isatty", lambda: False)
    yield
    jax.config.update("jax_platforms", platforms)  # compare() keeps its process to the CPU


class Trained(list):
    """Names of the runs that were trained, in order."""

    interrupted: tuple[str, ...] = ()  # ends of the names of those that Ctrl-C ends after a step


@pytest.fixture
def trained(one_device, monkeypatch):
    """Trains by the stand-in, in process."""
    names = Trained()

    def train(run):
        execution.write_config(run)
        run.folder.mkdir(exist_ok=True)
        names.append("/".join(run.folder.parts[-2:]))
        is_stopped = names.interrupted and names[-1].endswith(names.interrupted)

        def after_step():
            if is_stopped:
                raise KeyboardInterrupt

        code = stand_in.train(flatten(run.config), after_step)
        after_step()
        return code

    monkeypatch.setattr(execution, "train", train)
    return names
