"""Runs a conversion; writes either the complete result or nothing."""

import collections
from collections.abc import Callable
from pathlib import Path
from typing import Any

from MaxText.config import import_modules, values
from MaxText.config.loading import LoadedConfig, load
from MaxText.config.schema import flatten
from MaxText.config.sources import Source
from MaxText.conversion import hf_config, hf_export, imported_run, tokenizer_copy, verification
from MaxText.conversion.fattorib_checkpoint import FattoribCheckpoint
from MaxText.conversion.hf_checkpoint import GENERATION_CONFIG, is_file, local_path, resolve_hf_path
from MaxText.conversion.hf_import import HFWeights
from MaxText.conversion.maxtext_checkpoint import MaxTextWeights
from MaxText.conversion.request import ConvertArgs
from MaxText.conversion.stored_arrays import RunWeights
from MaxText.conversion.weight_source import WeightSource
from MaxText.errors import UserError
from MaxText.input_pipeline.token_store.manifest import TOKENIZER_NAME
from MaxText.input_pipeline.tokenization.interface import read_json

Log = Callable[[str], None]

_PROGRAMS = {"maxtext": "MaxText", "fattorib": "fattorib/transformer"}
_SCALINGS = {
    "weights": "1/sqrt(head_dim) is trained into the query weights, which are multiplied back",
    "model": "1/sqrt(head_dim) is not in the query weights, which stay as they are",
}


def convert(request: ConvertArgs, log: Log) -> None:
    """Converts as requested; leaves nothing behind on errors.

    Raises UserError if the source or the target cannot be used.
    """
    imported_run.require_absent(request.target)
    loaded = None
    if request.source_kind == "hf":
        source = resolve_hf_path(request.source, "from")
        given = {name: values.from_text(text) for name, text in request.keys.items()}
        weights = HFWeights(source, given)
        if request.verify:
            verification.check_possible(weights.family, weights.config)
        tokenizer_copy.check_ids(source, weights.config.model.shape.vocab_size)
        shown = f"{source}: {weights.family.architecture}, "
    elif request.source_kind == "run":
        if request.config_file:
            loaded = load(request.arguments)
        else:
            import_modules.collect(request.arguments, {})
        weights = RunWeights(request.source, loaded.config if loaded else None)
        shown = f"{weights.stored}: "
        for warning in import_modules.changes(weights.metadata):
            log(warning)
    elif not request.arguments:
        raise UserError(
            f"{_PROGRAMS[request.source_kind]} checkpoints have no model configuration. Add it: "
            f"convert.py CONFIG.yml from={request.source_kind}:... to=..., or model_name=NAME or "
            "keys."
        )
    else:
        loaded = load(request.arguments)
        if request.source_kind == "maxtext":
            weights = MaxTextWeights(request.source, loaded.config, request.query_scaling)
            shown = f"{weights.folder}: "
        else:
            weights = FattoribCheckpoint(request.source, loaded.config)
            shown = f"{weights.file}: "
    sizes = collections.Counter()
    for name, param in weights.model.parameters.items():
        sizes[weights.formats[name].name] += param.size
    formats = ", ".join(f"{count:,} {kind}" for kind, count in sizes.items())
    log(f"Reading {shown}{weights.model.num_parameters:,} parameters ({formats})")
    if isinstance(weights, MaxTextWeights):
        log(f"query_scaling={weights.query_scaling}: {_SCALINGS[weights.query_scaling]}")
    if request.target_kind == "stablehlo":
        _to_program(request, weights, log)
    elif request.target_kind == "hf":
        _to_folder(request, weights, log)
    else:
        _to_run(request, weights, loaded, log)


def _to_run(
    request: ConvertArgs, weights: WeightSource, loaded: LoadedConfig | None, log: Log
) -> None:
    source = weights.folder if isinstance(weights, HFWeights) else None
    if isinstance(weights, HFWeights):
        widened, keys = weights.widened, weights.keys
        for narrow in sorted(set(widened.values())):
            log(f"{narrow} becomes float32, which is exact")
        generation = weights.folder / GENERATION_CONFIG
        note: dict[str, Any] = {
            "config": weights.config_json,
            "generation_config": read_json(generation) or None,
            "formats": widened,
        }
        origin = f"{weights.folder.name} ({weights.family.architecture})"
    else:
        assert loaded is not None
        given = [
            name
            for name, origin in loaded.origins.items()
            if origin.source not in (Source.DEFAULT, Source.DERIVED)
        ]
        keys = hf_config.model_keys(flatten(loaded.config), {"decoder_block", *given})
        note = {"path": request.source}
        if isinstance(weights, MaxTextWeights):
            note["query_scaling"] = weights.query_scaling
        origin = f"the {_PROGRAMS[request.source_kind]} checkpoint {request.source}"
    metadata = {"hugging_face" if source else request.source_kind: note}
    comment = [f"Model of {origin}, imported by convert.py."]
    copied = []
    with imported_run.atomic_target(request.target) as partial:
        imported_run.write_run(partial, weights, keys, comment, metadata)
        if source:
            copied = tokenizer_copy.copy_files(source, partial / tokenizer_copy.RUN_FOLDER_NAME)
        if source and request.verify:
            verification.verify(RunWeights(str(partial)), source, str(source), log)
    imported_run.log_next_command(request.target, copied, log)


def _to_folder(request: ConvertArgs, weights: WeightSource, log: Log) -> None:
    note = weights.hugging_face if isinstance(weights, RunWeights) else {}
    kept = note.get("config") or {}
    folded, zoom_note = hf_export.fold_zoom_into_values(weights, request.family)
    family = hf_config.find_family(folded.config, request.family, hf_config.lookup_family(kept))
    if request.verify:
        verification.check_possible(family, folded.config)
    export = hf_export.HFExporter(folded, family, request.dtype, note.get("formats"))
    if zoom_note:
        log(zoom_note)
    tokenizer = _tokenizer(request, weights)
    if tokenizer is not None:
        tokenizer_copy.check_ids(tokenizer, weights.config.model.shape.vocab_size)
    with imported_run.atomic_target(request.target) as partial:
        partial.mkdir()
        copied, token_ids = ([], {})
        if tokenizer is not None:
            copied, token_ids = tokenizer_copy.export_tokenizer(tokenizer, partial)
        config_json = export.config_json(kept, token_ids)
        generation = note.get("generation_config")
        configs = hf_export.write_configs(partial, config_json, generation, family)
        files = export.write(partial, request.max_shard_size)
        if request.verify:
            verification.verify(weights, partial, str(request.target), log, request.dtype)
    shards = files[0] if len(files) == 1 else f"{len(files)} files of tensors and their index"
    names = [*configs, shards, *copied]
    log(f"Wrote {request.target} as {family.architecture}: {', '.join(names)}")
    if not copied:
        dataset_path = weights.config.data.dataset_path
        log(
            f"note: no tokenizer is exported: neither the run nor dataset_path={dataset_path} has "
            "one; add tokenizer=FOLDER"
        )
    unsupported = hf_config.absent_in_transformers(family, folded.config)
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
    return next((one for one in folders if is_file(one / TOKENIZER_NAME)), None)


def _to_program(request: ConvertArgs, weights: WeightSource, log: Log) -> None:
    from MaxText.conversion import stablehlo

    longest = weights.config.model.shape.max_target_length
    length = longest if request.length == -1 else request.length
    if length > longest:
        raise UserError(f"length={length} is above max_target_length={longest} of the model.")
    stablehlo.check_size(weights)
    stablehlo.write(weights, length, request.target, log)
