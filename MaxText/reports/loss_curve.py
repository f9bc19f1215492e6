"""Draws a run's loss_curve.png."""

from etils import epath

from MaxText.metrics.run_record import read_run
from MaxText.reports.curves import Axes
from MaxText.reports.entries import arrange
from MaxText.reports.pictures import draw_chart
from MaxText.reports.run_charts import loss_chart

FILE_NAME = "loss_curve.png"


def draw_loss_curve(run_folder: str | epath.Path) -> epath.Path | None:
    """Draws loss over steps and tokens; returns the path, or None if there is nothing to draw.

    Raises UserError if the folder has no readable events.
    """
    run = read_run(run_folder)
    axes, entries = Axes([run]), arrange([run])
    chart = loss_chart(entries, axes)
    if chart is None:
        return None
    picture = draw_chart(chart, axes.axis("step"), run.name, above=axes.axis("tokens"))
    if picture is None:
        return None
    path = run.folder / FILE_NAME
    path.write_bytes(picture)
    return path
