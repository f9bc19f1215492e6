"""Weights that bring their own configuration and tokenizer."""

import json
import shutil

import pytest
from etils import epath

from MaxText.checkpointing import checkpoint_files
from MaxText.checkpointing.health import HealthyCheckpoints
from MaxText.config.command_line import explain_value
from MaxText.config.loading import load_config
from MaxText.config.schema import flatten
from MaxText.conversion.convert import convert
from MaxText.conversion.request import parse_arguments
from MaxText.errors import UserError
from MaxText.inference.checkpoint_config import load
from MaxText.inference.model_tokenizer import open_tokenizer
from MaxText.inference.trained_model import load_model, resolve_weights, with_stored_zoom
from MaxText.input_pipeline.prepare.prepare import prepare
from MaxText.run.records import write_run_files
from tests.inference.small_models import END, llama_folder
from tests.refusals import refused


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("weights")
    llama_folder(root / "hf", with_bos=True)
    convert(parse_arguments([f"from=hf:{root / 'hf'}", f"to={root / 'run'}"]), lambda line: None)
    return root


@pytest.mark.parametrize("name", ["hf", "run", "run/checkpoints/0", "run/checkpoints/0/items"])
def test_the_model_is_that_of_the_weights(folders, name):
    path = f"load_parameters_path={folders / name}"
    loaded = load([path, "max_target_length=8"], "decode.py")
    shape = loaded.config.model.shape
    assert (shape.base_emb_dim, shape.base_num_decoder_layers, shape.vocab_size) == (16, 2, 260)
    assert shape.max_target_length == 8  # the command line beats the weights
    assert str(folders / name.split("/")[0]) in explain_value(loaded, "base_emb_dim")


def test_a_config_file_or_preset_decides_instead(folders, tmp_path):
    (tmp_path / "own.yml").write_text("base_emb_dim: 48\n")
    path = f"load_parameters_path={folders / 'run'}"
    assert load([str(tmp_path / "own.yml"), path]).config.model.shape.base_emb_dim == 48
    assert load(["model_name=gpt2-124m", path]).config.model.shape.base_emb_dim == 768


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("load_parameters_path=nowhere promt=a", "promt"),  # before weights are looked for
        ("load_parameters_path=nowhere", "nowhere"),
        ("load_parameters_path=hf:nowhere", "nowhere"),
    ],
)
def test_mistakes(line, named, tmp_path):
    refused(named, load, line.split(), "decode.py")
    config = load([f"base_output_directory={tmp_path}", "run_name=first"]).config
    refused(r"load_parameters_path=", resolve_weights, config)


@pytest.mark.parametrize("name", ["hf", "run"])
def test_weights_and_tokenizer_are_opened(folders, name):
    config = load([f"load_parameters_path={folders / name}"]).config
    lines = []
    trained = load_model(config, lines.append)
    assert trained.params["token_embedder"]["embedding"].shape == (260, 16)
    assert str(folders / name) in lines[-1]
    tokenizer = open_tokenizer(config, trained.folder, trained.metadata)
    assert tokenizer.prefix == (256,)
    assert tokenizer.eos_ids == (256, 3)
    ids = tokenizer.encode("hé")
    assert ids[0] == 256
    assert len(ids) == 4
    assert tokenizer.decode([*ids, 256]) == "hé"


def test_the_newest_checkpoint_is_taken_unless_a_step_is_named(folders, tmp_path):
    """Also where it is one of which nothing is known yet: 0 is good, and 7 unconfirmed."""
    run = tmp_path / "run"
    shutil.copytree(folders / "run", run)
    good = HealthyCheckpoints(epath.Path(run / "checkpoints"), 10, pytest.fail)
    good.promote(0)
    good.write()
    shutil.copytree(run / "checkpoints" / "0", run / "checkpoints" / "7")
    for arguments, step in (
        ([f"load_parameters_path={run}"], 7),
        ([f"{run}/config.yml", f"base_output_directory={tmp_path}", "run_name=run"], 7),
        ([f"load_parameters_path={run}/checkpoints/0"], 0),
    ):
        trained = load_model(load(arguments).config, [].append)
        assert trained.folder.endswith(f"checkpoints/{step}")
    lines = []
    convert(parse_arguments([f"from={run}", f"to=hf:{tmp_path / 'hf'}"]), lines.append)
    assert any(f"{run}/checkpoints/7" in line for line in lines)


@pytest.mark.parametrize(
    ("rows", "add_bos", "largest"),
    [(258, True, None), (257, False, None), (257, True, 257), (256, False, 256)],
)
def test_a_model_needs_rows_for_the_ids_of_its_data_alone(tmp_path, rows, add_bos, largest):
    keys = {"tokenizer_path": "byte", "vocab_size": rows, "add_bos": add_bos}
    config = load_config(dataset_type="synthetic", **keys)
    if largest is not None:
        with pytest.raises(UserError, match=rf"{largest}\b.* vocab_size={rows}"):
            open_tokenizer(config, str(tmp_path), typed=True)
        return
    tokenizer = open_tokenizer(config, str(tmp_path), typed=True)
    assert tokenizer.encode("hi") == ([257, 104, 105] if add_bos else [104, 105])
    # What precedes a text that is scored has a row as well.
    assert tokenizer.prefix_token_id() == (257 if add_bos else 256)


def test_tokenizers_of_a_folder(tmp_path):
    folder = llama_folder(tmp_path / "hf")
    path = f"load_parameters_path={folder}"
    config = load([path]).config
    tokenizer = open_tokenizer(config, str(folder))
    assert tokenizer.prefix == ()
    # A text without any token begins where another ended.
    assert tokenizer.encode("") == [256]
    settings = {"eos_token": END, "bos_token": END, "add_bos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    assert open_tokenizer(config, str(folder)).prefix == (256,)
    with pytest.raises(UserError, match=r"256\b.*vocab_size=100"):
        open_tokenizer(load([path, "vocab_size=100"]).config, str(folder))

    loaded = load([path, "tokenizer_path=bytes", "vocab_size=300"])
    assert loaded.typed("tokenizer_path")
    tokenizer = open_tokenizer(loaded.config, str(folder), typed=True)
    assert tokenizer.tokenizer.entry.origin != "file tokenizer.json"
    gone = load([path, "tokenizer_path=gone/tokenizer.json"]).config
    refused(r"tokenizer_path=gone/tokenizer\.json", open_tokenizer, gone, str(folder), typed=True)
    # From a file, which may name a hub's id, it comes after what lies here.
    assert open_tokenizer(gone, str(folder)).folder == folder
    (folder / "tokenizer.json").unlink()
    refused("tokenizer_path=", open_tokenizer, config, str(folder))


def test_typed_data_replace_those_of_the_training(tmp_path, folders):
    shutil.copytree(folders / "run", tmp_path / "run")
    stored = checkpoint_files.resolve_checkpoint(str(tmp_path / "run"), "test")
    metadata, checksums, *_ = stored.metadata
    data = {"data_mixture_weights": [["a", 1.0], ["b", 1.0]], "grain_eval_files": "c"}
    metadata["config"] |= data
    (stored.folder / checkpoint_files.METADATA).rmtree()
    stored.write_metadata(metadata, checksums)
    path = f"load_parameters_path={tmp_path / 'run'}"
    data = load([path]).config.data
    assert (len(data.data_mixture_weights), data.grain_eval_files) == (2, "c")
    data = load([path, "dataset_path=other"]).config.data
    assert (data.data_mixture_weights, data.grain_eval_files) == ((), "")
    assert data.dataset_path == "other"


@pytest.mark.parametrize("add_bos", [True, False])
def test_a_run_keeps_the_tokenizer_of_its_data(tmp_path, add_bos):
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "a.txt").write_text("some text of a few words\n" * 20)
    folder = llama_folder(tmp_path / "hf", with_bos=True)
    keys = {"dataset_path": str(tmp_path / "data"), "prepare_source": str(texts)}
    keys |= {"tokenizer_path": str(folder), "add_bos": add_bos, "prepare_num_workers": 1}
    prepare(load_config(**keys).preparation, keys["dataset_path"], log=lambda line: None)
    (tmp_path / "run").mkdir()
    write_run_files(epath.Path(tmp_path / "run"), load_config(), tmp_path / "data")
    (tmp_path / "data").rename(tmp_path / "moved")
    # How the data begin counts, whatever the tokenizer.json puts before a text.
    config = load_config(vocab_size=260)
    tokenizer = open_tokenizer(config, str(tmp_path / "run" / "checkpoints" / "7"))
    assert tokenizer.prefix == ((256,) if add_bos else ())
    assert tokenizer.folder == tmp_path / "run" / "tokenizer"


def test_slots_keep_the_zoom_that_growth_has_fixed(tmp_path):
    tiny = {"decoder_block": "tokenformer", "base_emb_dim": 16, "base_num_query_heads": 2}
    tiny |= {"base_num_kv_heads": 2, "base_num_decoder_layers": 1, "vocab_size": 32, "head_dim": 8}
    tiny |= {"max_target_length": 8, "slot_num": 12}
    step = tmp_path / "run" / "checkpoints" / "4"
    (step / "items").mkdir(parents=True)
    (step / "items" / "_METADATA").write_text("{}")
    (step / "metadata").mkdir()
    stored = flatten(load_config(**tiny, zoom_dim=8))
    metadata = checkpoint_files.with_digests({"config": stored}, {}, {})
    (step / "metadata" / "metadata").write_text(json.dumps(metadata))
    weights = resolve_weights(load_config(load_parameters_path=str(tmp_path / "run")))
    small = with_stored_zoom(load_config(**tiny), weights.metadata)
    assert small.model.pattention.zoom("ffn", 16) == 32
    typed = with_stored_zoom(load_config(**tiny, zoom_dim=6), weights.metadata)
    assert typed.model.pattention.zoom("qkv", 16) == 6
