"""Keys about data: what is read, how it is cut, masked and prepared."""

from collections.abc import Iterable
from typing import Any, Literal

from MaxText.config.keys import (
    Count,
    CountOrAuto,
    Fraction,
    Natural,
    NonNegative,
    Section,
    Share,
    key,
)

_STORED: dict[str, Iterable[Any]] = {"dataset_type": ["grain"]}
# How a mixture takes windows from a source; the first is the default.
SAMPLINGS = ("chunks", "documents_random", "documents_fixed")
_MASKED: dict[str, Iterable[Any]] = {"mlm_training": [True]}


class Data(Section):
    """Where tokens come from and how they become windows."""

    ONLY_IF = _STORED

    dataset_type: Literal["grain", "synthetic"] = key(
        "grain", "grain: what lies at dataset_path. synthetic: random tokens."
    )
    dataset_path: str = key(
        "",
        "What to read: a folder that prepare_data.py wrote, or token records as they are (tfrecord,"
        " Megatron .bin and .idx, webdataset .tar, parquet, arrow): folder, file, pattern with * "
        "or {000..127}, or @FILE with one name per line. Local or a URL such as gs://.",
    )
    grain_train_files: str = key(
        "",
        "Records to train on instead of dataset_path: PATTERN, or PATTERN,WEIGHT;PATTERN,WEIGHT. "
        "Records of text are tokenised with tokenizer_path.",
    )
    grain_eval_files: str = key(
        "", "Records to evaluate on, as grain_train_files. Empty: eval_split of dataset_path."
    )
    grain_file_type: Literal[
        "auto", "prepared", "arrayrecord", "tfrecord", "parquet", "arrow", "webdataset", "megatron",
        "text",
    ] = key(
        "auto", "Format of the files; auto tells it by name and content.", only_if=_STORED
    )  # fmt: skip
    dataset_mix: tuple[tuple[str, float] | tuple[str, int, str, float], ...] = key(
        (),
        "Mixture to train on: [dataset_path, weight] each, or GPT-Neo's [dataset_path, stitch, "
        "sampling, weight], where sampling is chunks, documents_random or documents_fixed.",
    )
    mixture_temperature: NonNegative = key(
        0.0,
        "Above 0, weights of a mixture are multiplied by (tokens of the source)^(1/temperature): 1 "
        "is proportional to size, larger is more even. 0 takes the weights as they are.",
    )
    data_cache_dir: str = key(
        "~/maxtext_data_cache",
        "Folder for what is made once: imports of record files, text that was tokenized while "
        "reading, plans of packing. Unused ones are deleted after half a year.",
    )
    train_split: str = key("train", "Split to train on.")
    eval_split: str = key(
        "validation", "Split to evaluate on; of plain record files, those whose name contains it."
    )
    tokens_field: str = key(
        "", "Field of a record that holds its ids. Empty: input_ids, text or tokens."
    )
    records_eos_id: int = key(
        -1, "Id put at the end of each record that is a document without one; -1 adds none.", ge=-1
    )
    enable_data_shuffling: bool = key(
        True, "Visit windows in a random order, another one each epoch."
    )
    data_shuffle_seed: Natural = key(0, "Seed of the order (and of synthetic tokens).", only_if={})
    iter_file_nums: Natural = key(
        0, "Shuffle within groups of this many files, visited in order; 0 shuffles everything."
    )
    megatron_order: Literal["stored", "gpt_neox"] = key(
        "stored",
        "Order of Megatron data: stored (what Pythia published shuffled), or gpt_neox (the sample "
        "index that GPT-NeoX builds from data_shuffle_seed).",
    )
    megatron_split: str = key(
        "", "Shares of training, validation and test documents: 969,30,1. Empty: all train.",
        only_if={"megatron_order": ["gpt_neox"]},
    )  # fmt: skip
    num_epoch: CountOrAuto = key(
        -1, "Passes over the data after which training stops; -1 repeats until `steps`."
    )
    packing: bool = key(
        True,
        "Fill windows with several documents; false starts each document in a window of its own "
        "and pads.",
    )
    grain_packing_type: Literal["concat_then_split", "first_fit", "best_fit"] = key(
        "concat_then_split",
        "concat_then_split: documents end to end, cut every max_target_length tokens. first_fit, "
        "best_fit: documents stay whole where they fit.",
        only_if={"packing": [True]},
    )
    use_truncation: bool = key(
        False, "Drop what of a document is longer than a window, instead of going on in further "
        "windows.", only_if={"packing": [False]},
    )  # fmt: skip
    attend_across_documents: bool = key(
        False, "Let attention, positions and loss cross from one document of a window to the next."
    )
    zero_loss: bool = key(
        True, "Count targets with id 0; false leaves them out, as MUDDFormer's runs did."
    )
    on_bad_record: Literal["fail", "skip"] = key(
        "fail",
        "What a record with a wrong checksum does when its file is imported: stop the run, or be "
        "left out. Damaged text always stops it.",
    )
    max_bad_records: Natural = key(
        100,
        "Unreadable records after which a run with on_bad_record=skip stops too; also the rows and "
        "files of text that preparation leaves out because they cannot be read, 0 for none.",
        only_if={},
    )
    data_read_retries: Natural = key(
        5,
        "Times that a failed read of data is tried again (a file that is missing, an I/O "
        "error, a read that hangs) before the run stops.",
    )
    data_retry_seconds: NonNegative = key(
        1.0, "Wait before the first of them; each further one waits twice as long, at most 60 s.",
        unit="seconds",
    )  # fmt: skip
    data_read_timeout: NonNegative = key(
        60.0, "Seconds without a batch that count as a failed read; 0 waits for ever.",
        unit="seconds",
    )  # fmt: skip
    excluded_samples: tuple[tuple[int, int], ...] = key(
        (),
        "Pairs [first, end] of sample numbers to leave out of the training data, as a rewind does; "
        "later samples move up.",
        only_if={},
    )
    grain_worker_count: Natural = key(0, "Reader processes; 0 reads in a thread of this process.")
    reuse_example_batch: bool = key(
        False, "Feed the first batch again and again (benchmarks).", only_if={}
    )


class Masking(Section):
    """Masked language modelling (BERT): which inputs are hidden and predicted."""

    ONLY_IF = _MASKED

    mlm_training: bool = key(False, "Predict hidden tokens from both sides, not the next token.")
    mlm_mask_id: int = key(-1, "Id of the mask; -1 takes the tokenizer's [MASK].", ge=-1)
    mlm_cls_token_id: int = key(-1, "Id put before each window, never hidden; -1 puts none.", ge=-1)
    mlm_mask_prob: float = key(0.15, "Share of the tokens that are predicted.", gt=0, le=1)
    mlm_same_token_prob: Share = key(0.1, "Share of these that stay as they are.")
    mlm_random_token_prob: Share = key(0.1, "Share of these that become a random token.")
    mlm_mask_ignore_ids: tuple[int, ...] = key(
        (), "Ids that are never predicted, besides CLS, mask, bos, eos and pad."
    )


class Preparation(Section):
    """How text becomes token records: prepare_data.py, or train.py where prepare_source is set."""

    prepare_source: str = key(
        "",
        "Text to prepare: files, folders or patterns, comma separated (.txt, .jsonl, .zst, .tar, "
        "parquet, arrow ...), or python_stdlib for the source code of the running interpreter.",
    )
    text_field: str = key("text", "Field of a row or record that holds the text.")
    tokenizer_path: str = key(
        "",
        "Tokenizer: folder, tokenizer.json, SentencePiece .model, tiktoken file, hub id, or bytes "
        "for one id per byte. Empty: train a BPE.",
    )
    tokenizer_type: Literal["auto", "huggingface", "sentencepiece", "tiktoken", "byte"] = key(
        "auto", "Kind of tokenizer_path; auto tells it by the file."
    )
    tokenizer_vocab_size: int = key(
        4096, "Ids of the byte-level BPE trained on the text.", only_if={"tokenizer_path": [""]},
        ge=257,
    )  # fmt: skip
    tokenizer_special_tokens: tuple[str, ...] = key(
        ("<|endoftext|>",),
        "Control tokens of the BPE that is trained, in order of their ids from 0; the first ends "
        "documents.",
        only_if={"tokenizer_path": [""]},
    )
    add_bos: bool = key(False, "Start each document with the beginning-of-text id.")
    add_eos: bool = key(True, "End each document with the end-of-text id.")
    validation_fraction: Fraction = key(
        0.01, "Share of documents held out as the validation split."
    )
    prepare_seed: Natural = key(0, "Seed that chooses held-out documents.")
    prepare_fix_text: bool = key(False, "Repair broken Unicode with ftfy before tokenising.")
    prepare_minimum_tokens: Natural = key(
        0, "Leave out documents of fewer tokens (counted).", unit="tokens"
    )
    prepare_num_workers: Natural = key(0, "Processes that tokenise; 0 is one per core.")
    prepare_output_format: Literal[
        "array_record", "bin", "tfrecord", "parquet", "text_tfrecord", "text_array_record"
    ] = key(
        "bin",
        "bin (or array_record, an older name): a data set for training. tfrecord, parquet: token "
        "records as other programs read them. text_tfrecord, text_array_record: the text itself "
        "as records.",
    )
    prepare_record: Literal["documents", "chunks", "strided"] = key(
        "documents",
        "What a tfrecord or parquet record is: a document; chunks of chunk_length tokens, cut "
        "from all documents end to end; or jax_lm's strided windows with labels.",
        only_if={"prepare_output_format": ["tfrecord", "parquet"]},
    )
    prepare_field: str = key(
        "", "Name of the ids in a record. Empty: text in tfrecord, input_ids in parquet.",
        only_if={"prepare_output_format": ["tfrecord", "parquet"]},
    )  # fmt: skip
    prepare_chunk_length: int = key(
        2049, "Tokens of a chunk; the next one repeats its last token.", unit="tokens", ge=2,
        only_if={"prepare_record": ["chunks"]},
    )  # fmt: skip
    prepare_separator_id: int = key(
        -1, "Id between documents instead of the tokenizer's end of text; -1 takes that.", ge=-1
    )
    prepare_num_shards: Natural = key(
        0, "Record files to write; 0 is one per 256 MB of text.",
        only_if={
            "prepare_output_format": ["tfrecord", "parquet", "text_tfrecord", "text_array_record"]
        },
    )  # fmt: skip
    prepare_name: str = key(
        "", "First part of the names of record files. Empty: the split's name.",
        only_if={
            "prepare_output_format": ["tfrecord", "parquet", "text_tfrecord", "text_array_record"]
        },
    )  # fmt: skip
    prep_min_length: Count = key(
        128, "Shortest strided window, BOS and EOS included.", unit="tokens",
        only_if={"prepare_record": ["strided"]},
    )  # fmt: skip
    prep_max_length: int = key(
        256, "Tokens of a strided window, BOS and EOS included.", unit="tokens", ge=3,
        only_if={"prepare_record": ["strided"]},
    )  # fmt: skip
    prep_stride: Count = key(
        128, "Tokens between the starts of strided windows.", unit="tokens",
        only_if={"prepare_record": ["strided"]},
    )  # fmt: skip
    prep_ignore_label: int = key(
        -100, "Label of places that do not count.", only_if={"prepare_record": ["strided"]}
    )
    prepare_runner: Literal["local", "beam"] = key(
        "local", "Who runs the work: processes of this machine, or Apache Beam."
    )
    beam_options: str = key(
        "", "Options of Beam's runner, as on its own command line.",
        only_if={"prepare_runner": ["beam"]},
    )  # fmt: skip


def mix_part(part: tuple[str, float] | tuple[str, int, str, float]) -> tuple[str, int, str, float]:
    """One part of dataset_mix in its long form: location, stitch, sampling, weight."""
    if len(part) == 2:
        return part[0], 1, SAMPLINGS[0], part[1]
    return part
