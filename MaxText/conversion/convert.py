"""Runs a conversion; writes either the complete result or nothing."""

import collections
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import flatbuffers  # noqa: F401 (jax serializes programs with it, and does not ask for it)
import jax
import jax.export
import jax.numpy as jnp

from MaxText.config import import_modules, values
from MaxText.config.loading import load
from MaxText.config.schema import dotted, flatten
from MaxText.config.sources import Source
from MaxText.conversion import hf_config, hf_export, imported_run, tokenizer_copy
from MaxText.conversion.folding import fold_multipliers
from MaxText.conversion.hf_checkpoint import GENERATION_CONFIG, is_file, local_path, resolve_hf_path
from MaxText.conversion.hf_import import FattoribCheckpoint, HFWeights
from MaxText.conversion.maxtext_checkpoint import MaxTextWeights
from MaxText.conversion.model_card import MODEL_CARD, write_model_card
from MaxText.conversion.request import OTHER_PROGRAMS, ConvertArgs
from MaxText.conversion.weight_source import RunWeights, WeightSource, unflatten
from MaxText.errors import UserError
from MaxText.input_pipeline.token_store.manifest import TOKENIZER_NAME
from MaxText.input_pipeline.tokenization.interface import read_json
from MaxText.layers.batch import Batch
from MaxText.storage.atomic import sync_file
from MaxText.storage.paths import check_checkpoint_path

Log = Callable[[str], None]

_SCALINGS = {
    "weights": "1/sqrt(head_dim) is trained into the query weights, which are multiplied back",
    "model": "1/sqrt(head_dim) is not in the query weights, which stay as they are",
}
_PLATFORMS = ("cpu", "cuda", "tpu")  # of an exported program
# Weights are constants of the program, and the serializer uses 32-bit sizes.
_MAX_BYTES = 2**31 - 2**24


def convert(request: ConvertArgs, log: Log) -> None:
    """Converts as requested; leaves nothing behind on errors.

    Raises UserError if the source or the target cannot be used.
    """
    imported_run.require_absent(request.target)
    if request.target_kind == "run":
        check_checkpoint_path(request.target.absolute(), "to")
    source = _open(request, log)
    weights = source.weights
    sizes = collections.Counter()
    for name, param in weights.model.parameters.items():
        sizes[weights.formats[name].name] += param.size
    formats = ", ".join(f"{count:,} {kind}" for kind, count in sizes.items())
    log(f"Reading {weights.description}: {weights.model.num_parameters:,} parameters ({formats})")
    if isinstance(weights, MaxTextWeights):
        log(f"query_scaling={weights.query_scaling}: {_SCALINGS[weights.query_scaling]}")
    if request.target_kind == "stablehlo":
        _to_program(request, weights, log)
    elif request.target_kind == "hf":
        _to_folder(request, source, log)
    else:
        _to_run(request, source, log)


class _Source(NamedTuple):
    """What is converted."""

    weights: WeightSource
    keys: Mapping[str, Any]  # model keys for the config.yml of an imported run
    # What the weights alone do not say and an export needs, kept in the metadata of an imported
    # run: config.json and generation_config.json, formats of tensors that were widened, the path.
    record: Mapping[str, Any]


def _open(request: ConvertArgs, log: Log) -> _Source:
    """Opens the source without reading its weights; UserError if that is impossible."""
    if request.source_kind == "hf":
        folder = resolve_hf_path(request.source, "from")
        user_keys = {name: values.from_text(text) for name, text in request.keys.items()}
        weights = HFWeights(folder, dotted(user_keys))
        for note in weights.notes:
            log(note)
        if request.verify:
            hf_export.check_verifiable(weights.family, weights.config)
        tokenizer_copy.check_ids(folder, weights.config.model.shape.vocab_size)
        generation = read_json(folder / GENERATION_CONFIG) or None
        record = {"config": weights.config_json, "generation_config": generation}
        return _Source(weights, weights.keys, record | {"formats": weights.widened})
    if request.source_kind == "run":
        config = load(request.arguments).config if request.config_file else None
        if config is None:
            import_modules.collect(request.arguments)
        weights = RunWeights(request.source, config, average=request.average)
        for warning in import_modules.changes(weights.metadata):
            log(warning)
        return _Source(weights, {}, weights.metadata.get("hugging_face") or {})
    if not request.arguments:
        raise UserError(
            f"{OTHER_PROGRAMS[request.source_kind]} checkpoints have no model configuration. Add "
            f"it: convert.py CONFIG.yml from={request.source_kind}:... to=..., or model_name=NAME "
            "or keys."
        )
    loaded = load(request.arguments)
    computed = (Source.DEFAULT, Source.DERIVED)
    chosen = {name for name, origin in loaded.origins.items() if origin.source not in computed}
    keys = hf_config.model_keys(flatten(loaded.config), {"decoder_block", *chosen})
    record = {"path": request.source}
    if request.source_kind == "fattorib":
        return _Source(FattoribCheckpoint(request.source, loaded.config), keys, record)
    weights = MaxTextWeights(request.source, loaded.config, request.query_scaling)
    return _Source(weights, keys, record | {"query_scaling": weights.query_scaling})


def _to_run(request: ConvertArgs, source: _Source, log: Log) -> None:
    """Writes a run folder with the parameters, and the tokenizer of a Hugging Face folder."""
    weights = source.weights
    for narrow_format in sorted(set(source.record.get("formats", {}).values())):
        log(f"{narrow_format} becomes float32, which is exact")
    is_folder = isinstance(weights, HFWeights)
    metadata = {"hugging_face" if is_folder else request.source_kind: source.record}
    comment = [f"Model of {weights.description}, imported by convert.py."]
    copied = []
    with imported_run.atomic_target(request.target) as partial:
        imported_run.write_run(partial, weights, source.keys, comment, metadata)
        if is_folder:
            tokenizer = partial / tokenizer_copy.RUN_FOLDER_NAME
            copied = tokenizer_copy.copy_files(weights.folder, tokenizer)
            if request.verify:
                imported = RunWeights(str(partial))
                hf_export.verify(imported, weights.folder, str(weights.folder), log)
    imported_run.log_next_command(request.target, copied, log)


def _to_folder(request: ConvertArgs, source: _Source, log: Log) -> None:
    """Writes a Hugging Face folder with the weights and the tokenizer."""
    weights = source.weights
    record = source.record
    standard, multipliers_note = fold_multipliers(weights)
    folded, zoom_note = hf_export.fold_zoom_into_values(standard)
    imported_as = hf_config.lookup_family(record.get("config") or {})
    family = hf_config.find_family(folded.config, request.family, imported_as)
    if request.verify:
        hf_export.check_verifiable(family, folded.config)
    for note in filter(None, (multipliers_note, zoom_note)):
        log(note)
    tokenizer = _tokenizer(request, weights)
    if tokenizer is not None:
        tokenizer_copy.check_ids(tokenizer, weights.config.model.shape.vocab_size)
    left_out = hf_export.weights_left_out(family, folded)
    if left_out:
        log(
            f"note: {family.model_type} has no multi-token prediction: {left_out:,} weights, which "
            "only training reads, are left out"
        )
    with imported_run.atomic_target(request.target) as partial:
        partial.mkdir()
        copied = []
        token_ids = {}
        if tokenizer is not None:
            copied, token_ids = tokenizer_copy.export_tokenizer(tokenizer, partial)
        files = hf_export.write_folder(
            partial,
            folded,
            family,
            record,
            dtype=request.dtype,
            max_shard_bytes=request.max_shard_size,
            token_ids=token_ids,
        )
        unsupported = hf_config.absent_in_transformers(family, folded.config)
        name = request.target.name
        write_model_card(partial, name, weights, family, record, unsupported=unsupported or "")
        files.append(MODEL_CARD)
        if request.verify:
            hf_export.verify(weights, partial, str(request.target), log, dtype=request.dtype)
    log(f"Wrote {request.target} as {family.architecture}: {', '.join([*files, *copied])}")
    if not copied:
        dataset_path = weights.config.data.dataset_path
        log(
            f"note: no tokenizer is exported: neither the run nor dataset_path={dataset_path} has "
            "one; add tokenizer=FOLDER"
        )
    if not unsupported:
        log(f'Load it: AutoModelForCausalLM.from_pretrained("{request.target}")')
        return
    log(
        f"transformers has no {unsupported}. Programs here read the folder with "
        f"load_parameters_path=hf:{request.target}"
    )
    if family.auto_map:
        modules = sorted({name.partition(".")[0] for name in family.auto_map.values()})
        files = " and ".join(f"{module}.py" for module in modules)
        log(
            f"For AutoModelForCausalLM with trust_remote_code=True put {files} of {family.code} "
            f"into {request.target}"
        )


def _tokenizer(request: ConvertArgs, weights: WeightSource) -> Path | None:
    """Returns the folder of the tokenizer to export; None if there is none.

    It is the one that the user names, that of the run, or that of its dataset.
    """
    if request.tokenizer:
        folder = local_path(request.tokenizer)
        if not is_file(folder / TOKENIZER_NAME):
            raise UserError(f"tokenizer={request.tokenizer} is not a folder with {TOKENIZER_NAME}.")
        return folder
    if not isinstance(weights, RunWeights):
        return None
    run = Path(str(weights.stored.folder.parent.parent))
    folders = [run / tokenizer_copy.RUN_FOLDER_NAME]
    if weights.config.data.dataset_path:
        folders.append(local_path(weights.config.data.dataset_path))
    return next((candidate for candidate in folders if is_file(candidate / TOKENIZER_NAME)), None)


def _to_program(request: ConvertArgs, weights: WeightSource, log: Log) -> None:
    """Writes a program for jax and flatbuffers alone.

    Maps int32 [b, length] to float32 [b, length, vocab] for any b. Computes in the configuration's
    dtype, float32 if it is auto.
    """
    model = weights.model
    longest = model.config.shape.max_target_length
    length = longest if request.length == -1 else request.length
    if length > longest:
        raise UserError(f"length={length} is above max_target_length={longest} of the model.")
    parameters = model.parameters.items()
    size = sum(spec.size * weights.formats[name].itemsize for name, spec in parameters)
    if size > _MAX_BYTES:
        raise UserError(
            f"the weights take {size / 2**30:.1f} GiB, and a program with embedded weights is "
            f"limited to {_MAX_BYTES / 2**30:.1f} GiB. Export a folder with to=hf:FOLDER instead."
        )
    params = unflatten({name: jnp.asarray(weights.read(name)) for name in model.parameters})

    def forward(tokens_BT: jax.Array) -> jax.Array:
        return model.merge(params)(Batch(tokens_BT, tokens_BT, jnp.ones(tokens_BT.shape)))

    shape = jax.ShapeDtypeStruct((*jax.export.symbolic_shape("b"), length), jnp.int32)
    program = jax.export.export(jax.jit(forward), platforms=_PLATFORMS)(shape).serialize()
    with imported_run.atomic_target(request.target) as partial:
        partial.write_bytes(program)
        sync_file(partial)
    target = request.target
    megabytes = math.ceil(len(program) / 2**20)
    log(f"Wrote {target} ({megabytes:,} MiB), int32 [N, {length}] -> float32 [N, {length}, V]")
    log(f'Load it: jax.export.deserialize(bytearray(open("{target}", "rb").read()))')
