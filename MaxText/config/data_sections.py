"""Keys of datasets, masking and data preparation."""

from pathlib import Path
from typing import Annotated, Literal

from MaxText.config.keys import (
    Count,
    CountOrAuto,
    Fraction,
    NamedSection,
    Natural,
    NonNegative,
    OtherThan,
    Section,
    Share,
    key,
)
from MaxText.config.part_sections import DataSourceParts
from MaxText.config.registry import Name

FileType = Literal[
    "auto",
    "prepared",
    "arrayrecord",
    "tfrecord",
    "parquet",
    "arrow",
    "webdataset",
    "megatron",
    "datatrove",
    "dolma",
    "text",
]
PackingType = Literal["concat_then_split", "first_fit", "best_fit"]
_FILES = {"dataset_type": "grain"}
_DATA = {"dataset_type": OtherThan(("synthetic",))}
# How a mixture takes windows from a source; the first is the default.
SAMPLINGS = ("chunks", "documents_random", "documents_fixed")
_MASKED = {"mlm_training": True}


class TokenRecordsConfig(NamedSection):
    """Token records of other programs."""

    field: str = key("", "Record field with the token ids. Empty: input_ids, text or tokens.")
    eos_id: int = key(-1, ge=-1)
    """Id appended to each record that is a document without one; -1 appends none."""


class MegatronConfig(NamedSection):
    """Order and split of Megatron data."""

    order: Literal["stored", "gpt_neox"] = key("stored")
    """Order of samples: stored (as Pythia published it, shuffled), or gpt_neox (the sample index
    that GPT-NeoX builds from data_shuffle_seed)."""
    split: str = key("")
    """Shares of training, validation and test documents in the order gpt_neox: 969,30,1. Empty: all
    train."""


class BadRecordsConfig(NamedSection):
    """Handling of unreadable records."""

    action: Literal["fail", "skip"] = key("fail", only_if={})
    """Action on a record with a wrong checksum during import: fail the run, or skip the record.
    Corrupted text always fails."""
    maximum: Natural = key(100, only_if={})
    """Unreadable records after which a run with bad_records.action=skip fails too; also the
    documents that preparation skips because they cannot be read, 0 for none. Of an unreadable file,
    all documents count, estimated from its size if their number is unknown."""


class DataRetryConfig(NamedSection):
    """Retries of failed data reads."""

    attempts: Natural = key(5)
    """Retries of a failed data read (a missing file, an I/O error, a hanging read) before the run
    stops."""
    delay: NonNegative = key(1.0, unit="seconds")
    """Delay before the first retry, doubled for each further one up to 60 s."""
    timeout: NonNegative = key(60.0, unit="seconds")
    """Seconds without a batch that count as a failed read; 0 waits forever."""


class DataConfig(Section):
    """Datasets, and how tokens become training sequences."""

    ONLY_IF = _DATA

    dataset_type: Annotated[str, Name("data_source", "grain", "synthetic")] = key("grain")
    """grain: data at dataset_path. synthetic: random tokens. Or the name of a registered data
    source."""
    dataset_path: str = key("", only_if=_FILES)
    """Data to read: a folder that prepare_data.py wrote, or token records (tfrecord, Megatron .bin
    and .idx, webdataset .tar, parquet, arrow). Records: folder, file, pattern with * or {000..127},
    or @FILE with one name per line. Local or a URL such as gs://."""
    grain_train_files: str = key("", only_if=_FILES)
    """Records to train on instead of dataset_path: PATTERN, or PATTERN,WEIGHT;PATTERN,WEIGHT. Text
    records are tokenized with tokenizer_path."""
    grain_eval_files: str = key("")
    """Records to evaluate on, as grain_train_files. Empty: eval_split of dataset_path."""
    grain_file_type: FileType = key("auto")
    """Format of the files; auto detects it from their names."""
    data_mixture_weights: tuple[tuple[str, float] | tuple[str, int, str, float], ...] = key(
        (), only_if=_FILES
    )
    """Data mixture: [dataset_path, weight] each, or GPT-Neo's [dataset_path, stitch, sampling,
    weight], where sampling is chunks, documents_random or documents_fixed. source:NAME is a
    registered data source."""
    mixture_temperature: NonNegative = key(0.0, only_if=_FILES)
    """Above 0, mixture weights are multiplied by (tokens of the source)^(1/temperature): 1 is
    proportional to size, larger is more even. 0 uses the weights unchanged."""
    data_cache_dir: str = key("~/maxtext_data_cache")
    """Folder for imports of record files, text tokenized while reading, and packing plans. Of the
    processes that share it, one works and the others wait. With a URL such as gs://, records of a
    bucket are imported there by process 0 and read in place; all else is in ~/maxtext_data_cache.
    Local entries unused for half a year are deleted."""
    train_split: str = key("train", "Split to train on.")
    eval_split: str = key("validation")
    """Split to evaluate on; of plain record files, those with this word in their name."""
    token_records: TokenRecordsConfig = TokenRecordsConfig()
    enable_data_shuffling: bool = key(True)
    """Visit sequences in a random order, a new one each epoch."""
    data_shuffle_seed: Natural = key(0, only_if={})
    """Seed of the shuffle order (and of synthetic tokens)."""
    iter_file_nums: Natural = key(0, only_if=_FILES)
    """Shuffle within groups of this many files, visited in order; 0 shuffles globally."""
    megatron: MegatronConfig = MegatronConfig()
    num_epoch: CountOrAuto = key(-1, "Epochs after which training stops; -1 repeats until `steps`.")
    packing: bool = key(True)
    """Pack several documents into a sequence; false starts each document in a new padded
    sequence."""
    grain_packing_type: PackingType = key("concat_then_split", only_if="packing")
    """concat_then_split: concatenate documents and split every max_target_length tokens. first_fit,
    best_fit: keep documents whole if they fit."""
    use_truncation: bool = key(False, only_if={"packing": False})
    """Truncate documents that are longer than a sequence instead of splitting them."""
    cross_document_attention: bool = key(False)
    """Let attention, positions and loss cross document boundaries within a sequence."""
    zero_loss: bool = key(True)
    """Count targets with id 0 in the loss; false masks them, as MUDDFormer's runs did."""
    bad_records: BadRecordsConfig = BadRecordsConfig()
    data_retry: DataRetryConfig = DataRetryConfig()
    excluded_samples: tuple[tuple[int, int], ...] = key((), only_if={})
    """Pairs [first, end] of sample numbers to exclude from the training data, as a rollback does;
    later samples move up."""
    grain_worker_count: Natural = key(0)
    """Reader processes; 0 reads in a thread of the main process, as streams always are."""
    reuse_example_batch: bool = key(False, "Repeat the first batch (benchmarks).", only_if={})
    parts: DataSourceParts = DataSourceParts()

    @property
    def cache_url(self) -> str:
        """Folder of imports in a bucket, or ""."""
        folder = self.data_cache_dir.removeprefix("file://")
        return folder if "://" in folder else ""

    @property
    def local_cache_dir(self) -> Path:
        """Folder of caches on this machine; the default one if data_cache_dir is a URL."""
        section = DataConfig() if self.cache_url else self
        return Path(section.data_cache_dir.removeprefix("file://")).expanduser()


class MaskedTokensConfig(NamedSection):
    """Masked tokens."""

    mask_id: int = key(-1, "Mask token id; -1 is the tokenizer's [MASK].", ge=-1)
    cls_token_id: int = key(-1, ge=-1)
    """Id prepended to each sequence and never masked; -1 prepends none."""
    mask_prob: float = key(0.15, "Fraction of tokens that are predicted.", gt=0, le=1)
    same_token_prob: Share = key(0.1, "Fraction of predicted tokens that stay unchanged.")
    random_token_prob: Share = key(0.1)
    """Fraction of predicted tokens that are replaced by a random token."""
    mask_ignore_ids: tuple[int, ...] = key(())
    """Ids that are never predicted, in addition to CLS, mask, bos, eos and pad."""


class MaskingConfig(Section):
    """Masked language modeling (BERT)."""

    ONLY_IF = _MASKED

    mlm_training: bool = key(False)
    """Predict masked tokens from both sides instead of the next token."""
    mlm: MaskedTokensConfig = MaskedTokensConfig()


TokenizerType = Literal["auto", "huggingface", "sentencepiece", "tiktoken", "byte"]
_TRAINED = {"tokenizer_path": ""}
OutputFormat = Literal["bin", "tfrecord", "parquet", "text_tfrecord", "text_array_record"]
_OF_TOKENS = {"prepare_output_format": ["tfrecord", "parquet"]}
_RECORDS = {"prepare_output_format": ["tfrecord", "parquet", "text_tfrecord", "text_array_record"]}


class ExportedRecordsConfig(NamedSection):
    """Records for other programs."""

    ONLY_IF = _RECORDS

    content: Literal["documents", "chunks", "strided"] = key("documents", only_if=_OF_TOKENS)
    """Content of a tfrecord or parquet record: a document; chunks of chunk_length tokens from
    concatenated documents; or jax_lm's strided windows with labels."""
    field: str = key("", only_if=_OF_TOKENS)
    """Field of the token ids. Empty: text in tfrecord, input_ids in parquet."""
    chunk_length: int = key(2049, unit="tokens", ge=2)
    """Tokens per chunk; the next chunk repeats its last token."""
    num_shards: Natural = key(0, "Number of record files; 0 is one per 256 MB of text.")
    name: str = key("", "Prefix of record file names. Empty: the split's name.")
    min_length: Count = key(128, "Shortest strided window, BOS and EOS included.", unit="tokens")
    max_length: int = key(256, unit="tokens", ge=3)
    """Tokens of a strided window, BOS and EOS included."""
    stride: Count = key(128, "Tokens between the starts of strided windows.", unit="tokens")
    ignore_label: int = key(-100, "Label of ignored positions of strided windows.")


class RunnerConfig(NamedSection):
    """Runner of the preparation."""

    runner: Literal["local", "beam", "datatrove"] = key("local")
    """Engine of the preparation: local processes, Apache Beam, or an executor of datatrove."""
    beam_options: str = key("", only_if={"prepare.runner": "beam"})
    """Options of the Beam runner, as on its command line."""
    datatrove_options: str = key("", only_if={"prepare.runner": "datatrove"})
    """Arguments of datatrove's executor: executor=slurm partition=cpu time=02:00:00 workers=100."""


class PreparationConfig(Section):
    """Tokenization of text: prepare_data.py, or train.py with prepare_source."""

    prepare_source: str = key("")
    """Text to prepare: files, folders or patterns, comma separated (.txt, .jsonl, .zst, .tar,
    parquet, arrow ...), or python_stdlib for the source code of the running interpreter."""
    text_field: str = key("text", "Field of a row or record that contains the text.")
    tokenizer_path: str = key("")
    """Tokenizer: folder, tokenizer.json, SentencePiece .model, tiktoken file, hub id, or bytes for
    one id per byte. Empty: train a BPE."""
    tokenizer_type: TokenizerType = key("auto")
    """Type of tokenizer_path; auto detects it by the file."""
    tokenizer_vocab_size: int = key(4096, only_if=_TRAINED, ge=257)
    """Vocabulary size of the byte-level BPE trained on the text."""
    tokenizer_special_tokens: tuple[str, ...] = key(("<|endoftext|>",), only_if=_TRAINED)
    """Special tokens of the trained BPE, with ids from 0; the first ends documents."""
    add_bos: bool = key(False, "Start each document with the beginning-of-text id.")
    add_eos: bool = key(True, "End each document with the end-of-text id.")
    validation_fraction: Fraction = key(0.01)
    """Fraction of documents held out as the validation split."""
    prepare_seed: Natural = key(0, "Seed of the choice of held-out documents.")
    prepare_fix_text: bool = key(False, "Repair broken Unicode with ftfy before tokenizing.")
    prepare_minimum_tokens: Natural = key(0, unit="tokens")
    """Skip documents with fewer tokens (they are counted)."""
    prepare_num_workers: Natural = key(0, "Tokenizer processes; 0 is one per core.")
    prepare_output_format: OutputFormat = key("bin")
    """bin: a dataset for training. tfrecord, parquet: token records in the format of other
    programs. text_tfrecord, text_array_record: text records."""
    records: ExportedRecordsConfig = ExportedRecordsConfig()
    prepare_separator_id: int = key(-1, ge=-1, only_if="add_eos")
    """Id between documents instead of the tokenizer's end of text; -1 uses that."""
    prepare: RunnerConfig = RunnerConfig()

    @property
    def exports_text(self) -> bool:
        """Whether the output is text instead of token ids."""
        return self.prepare_output_format.startswith("text_")


def mix_part(part: tuple[str, float] | tuple[str, int, str, float]) -> tuple[str, int, str, float]:
    """Returns an entry of the mixture: (location, stitch, sampling, weight)."""
    if len(part) == 2:
        return part[0], 1, SAMPLINGS[0], part[1]
    return part
