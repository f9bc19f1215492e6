"""The HParams page of TensorBoard, read back from an event file."""

from tensorboardX import SummaryWriter
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.proto.plugin_hparams_pb2 import HParamsPluginData

from MaxText.configuration.loading import configure
from MaxText.configuration.saved import flat
from MaxText.monitoring.sinks.hyperparameters import hyperparameter_summaries

METRICS = ("eval/avg_loss", "learning/loss")


def written(folder, config_flat):
    """What the page finds under each tag: the plugin's data."""
    writer = SummaryWriter(str(folder))
    for summary in hyperparameter_summaries(config_flat, METRICS):
        writer.file_writer.add_summary(summary)
    writer.close()
    (path,) = folder.iterdir()
    data, found = path.read_bytes(), {}
    while data:  # TFRecord: length, its checksum, bytes, their checksum
        length = int.from_bytes(data[:8], "little")
        for value in Event.FromString(data[12 : 12 + length]).summary.value:
            assert value.metadata.plugin_data.plugin_name == "hparams"
            content = value.metadata.plugin_data.content
            found[value.tag] = HParamsPluginData.FromString(content)
        data = data[16 + length :]
    return found


def test_values_keep_their_kind(tmp_path):
    config = {
        "steps": 10,
        "learning_rate": 3e-4,
        "opt_type": "adamw",
        "scan_layers": True,
        "mlp_activations": ("silu", "linear"),
        "max_to_keep": None,
    }
    found = written(tmp_path, config)
    session = found["_hparams_/session_start_info"].session_start_info.hparams
    assert session["steps"].number_value == 10
    assert session["learning_rate"].number_value == 3e-4
    assert session["opt_type"].string_value == "adamw"
    assert session["scan_layers"].bool_value is True
    assert session["mlp_activations"].string_value == "[silu, linear]"
    assert session["max_to_keep"].string_value == "null"


def test_every_key_is_a_column_and_the_losses_are_the_metrics(tmp_path):
    config = flat(configure("quickstart.yml"))
    found = written(tmp_path, config)
    assert set(found) == {"_hparams_/experiment", "_hparams_/session_start_info"}
    experiment = found["_hparams_/experiment"].experiment
    assert {info.name for info in experiment.hparam_infos} == set(config)
    assert tuple(info.name.tag for info in experiment.metric_infos) == METRICS
    session = found["_hparams_/session_start_info"].session_start_info.hparams
    assert {name for name in config if session[name].WhichOneof("kind")} == set(config)
